"""What only a GPU can show: `make gpu` runs these tests, and they are left out where there is none.

With RLEXP_GPU_TESTS_ON_CPU=1 they run on the CPU, the Triton kernels by Triton's interpreter: so that no line of theirs
runs for the first time on a GPU. tests/bench/test_bench_gpu.py does that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import gpu_training
from bench.gpu import ON_CPU
from bench.gpu_foretell import foretell
from bench.gpu_here import machine, stand_in
from bench.gpu_longest import Option
from bench.simulate import call_of
from rlexp.base.engine_facts import ENGINES
from rlexp.base.kernel_needs import built, installed, takes
from rlexp.config.hardware import visible_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, LaunchConfig
from rlexp.launch.joining import RankSpec, join, launch_on
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.training.model.head import HeadLogps
from rlexp.training.ring.kernels import Plain, available
from rlexp.training.ring.kernels.base import BlockKernel, merge_plain
from rlexp.training.types import Wanted
from tests.helpers.attention import CALLS, named_call
from tests.helpers.beside_library import gaps
from tests.helpers.faults.plant import plant
from tests.helpers.fused_pieces import TOLERANCES as PIECES
from tests.helpers.fused_pieces import compare as compare_pieces
from tests.helpers.models import Held
from tests.helpers.ranks import seeded
from tests.helpers.reduced_apart import USUAL, Found, as_rank, hold
from tests.helpers.rehearsals import parted

pytestmark = pytest.mark.gpu

HERE = "cpu" if os.environ.get(ON_CPU) else "cuda"
DEVICE = torch.device(HERE)
GPUS = 2 if HERE == "cpu" else visible_gpus()
RINGS = [size for size in (1, 2, 4, 8) if size <= max(1, GPUS)]
HEADS = 8
LSE = 1  # the place of the log-sum-exp among the results of both passes
# Shares of the largest number of a result; an H100 kept them. A flash kernel rounds its probabilities to 16 bits before
# it multiplies.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}
# How far the loss and the gradients may lie from those of float64 on the CPU. Rotary tables are float32 in float64 too,
# and a GPU's cosine differs from a CPU's in the last bit: measured 3.5e-8 on an H100.
WITHIN = {"fp64": (1e-7, 2e-7), "fp32": (2e-5, 1e-4), "bf16": (3e-2, 1.0)}
WIDTH = 32 if HERE == "cpu" else 1024  # of matrices that torch's allocator gives blocks of their own
SHORT = ("logger=none", "data=synthetic", "data.size=16", "data.eval_size=4", "train.batch_size=8", "optim.lr=1e-3",
         "train.max_steps=4")  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks and commands find the device: the other tests have told DeepSpeed to stay on the CPU."""
    monkeypatch.setenv("DS_ACCELERATOR", HERE)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once; equal bits need it


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, device: str = HERE) -> list[Any]:
    return run_ranks(_joined, world_size, (device, function, args), device=device, preload=PRELOAD, timeout=500.0)


def _joined(spec: RankSpec, device: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    join(spec, launch_on(device, 120.0))
    return function(spec, *args)


def composed(*words: str, ring: int = 1, device: str = HERE) -> Config:
    ranks = (f"parallel.ring_size={ring}", f"launch.nproc={ring}")
    return compose_config([f"launch.device={device}", *SHORT, *ranks, *words])


def needs_of(engine: str) -> None:
    if ENGINES[engine].stage is not None and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")


engines = pytest.mark.parametrize("engine", ENGINES)
rings = pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"ring{ring}")


# ---- kernels ----


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["torch_flash", "flash_attn", "flash_attn_3", "flash_attn_4", "plain"])
def test_a_kernel_equals_the_plain_one_in_float64(name: str, dtype: torch.dtype) -> None:
    """Both passes, for every kind of call, three numbers of key/value heads and three sizes of heads."""
    if HERE == "cpu" and name == "torch_flash":
        name = "cpu_flash"
    if name not in {kernel.name for kernel in available(HERE, dtype)}:
        why = "computes in 16 bits only" if dtype is torch.float32 else "is not installed, or not for this GPU"
        pytest.skip(f"{name} {why}")
    if dtype is torch.float16 and built(name):
        pytest.skip(f"{name} was built for bf16 alone: bench/flash_attn_2.py")
    for size in (each for each in (16, 64, 128) if takes(name, each)):
        kernel = next(each for each in available(HERE, dtype, size) if each.name == name)
        for call in CALLS:
            for kv_heads in (HEADS, 2, 1) if call != "no segment" else ():
                compare(kernel, call, kv_heads, size, dtype)


@pytest.mark.parametrize("size", [96, 192, 256])
def test_flash_attn_4_takes_each_size_of_heads_that_it_is_said_to(size: int) -> None:
    """Beyond 128 on Hopper alone. Causal, unequal lengths, and a window; its tiles depend on all three."""
    kernel = of_this_gpu("flash_attn_4", size)
    for call in ("packed", "earlier keys", "a window over several tiles"):
        for kv_heads in (HEADS, 2):
            compare(kernel, call, kv_heads, size, torch.bfloat16)


def of_this_gpu(name: str, size: int) -> BlockKernel:
    found = [kernel for kernel in available(HERE, torch.bfloat16, size) if kernel.name == name]
    if not found:
        pytest.skip(f"{name} is not installed, or not for heads of {size} on this GPU")
    return found[0]


@pytest.mark.parametrize("name", ["torch_flash", "flash_attn", "flash_attn_3", "flash_attn_4"])
def test_a_kernel_gives_the_same_bits_where_that_is_asked_for(name: str) -> None:
    """Ten times, over several tiles and grouped heads, where sums of several blocks might come in another order."""
    torch.use_deterministic_algorithms(True)
    try:
        kernel = of_this_gpu("cpu_flash" if HERE == "cpu" and name == "torch_flash" else name, 64)
        for call in ("a window over several tiles", "fewer keys than queries over several tiles"):
            *given, lse = blocks(call, 2, 64)
            given = [x.to(DEVICE, torch.bfloat16) for x in given]
            first, *others = (both_passes(kernel, call, 64, [*given, lse.float().to(DEVICE)]) for _ in range(10))
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), call
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [64, 128, 192])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_4_holds_what_a_rehearsal_counts(size: int, causal: bool) -> None:
    """In its backward pass, with and without grouped heads and equal bits: what is asked of the allocator."""
    from rlexp.training.ring.kernels.flash_attn_4 import workspace
    from rlexp.training.ring.kernels.varlen import spans_of

    for kv_heads, exact in ((HEADS, False), (2, False), (2, True)):
        torch.use_deterministic_algorithms(exact)
        try:
            kernel, call = of_this_gpu("flash_attn_4", size), call_of((1000, 3000), (1000, 3000), causal)
            q, k = (torch.randn(4000, each, size, device=DEVICE).bfloat16() for each in (HEADS, kv_heads))
            out, lse = kernel.forward(q, k, k, call, 1.0)
            (spans,) = spans_of(call, q.device)
            options = (*spans.bounds, 1.0, causal, None, None)
            own = workspace(q, q, k, k, out, lse, *options, exact, kernel.generation)
            kernel.backward(out, q, k, k, out, lse, call, 1.0)  # compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            kernel.backward(out, q, k, k, out, lse, call, 1.0)
            held = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        finally:
            torch.use_deterministic_algorithms(False)
        assert held == own + q.nbytes + 2 * k.nbytes, (kv_heads, exact)


def compare(kernel: BlockKernel, call: str, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    *given, lse = blocks(call, kv_heads, size)
    rounded, lse = [x.to(dtype) for x in given], lse.float()
    got = both_passes(kernel, call, size, [x.to(DEVICE) for x in (*rounded, lse)])
    exact = both_passes(Plain(), call, size, [x.double() for x in (*rounded, lse)])
    for part, (one, other) in enumerate(zip(got, exact, strict=True)):
        close(one, other, TOLERANCE[dtype] if part != LSE or dtype == torch.float32 else 1e-3)


def blocks(call: str, kv_heads: int, size: int) -> list[Tensor]:
    """Return q, k, v, the ring's output, its gradient, and a log-sum-exp that is larger than the block's."""
    queries, keys = sum(CALLS[call][0]), sum(CALLS[call][1])
    shapes = ((queries, HEADS), (keys, kv_heads), (keys, kv_heads), (queries, HEADS), (queries, HEADS))
    found = [seeded(tokens, heads, size, seed=number) for number, (tokens, heads) in enumerate(shapes)]
    return [*found, 2.0 + torch.tensor(1.0 + keys).log() + seeded(queries, HEADS, seed=9).abs()]


def both_passes(kernel: BlockKernel, name: str, size: int, given: list[Tensor]) -> list[Tensor]:
    how, (q, k, v, out, dout, lse) = (named_call(name), size**-0.5), given
    kernel.prepare(how[:1], q.device)
    return [*kernel.forward(q, k, v, *how), *kernel.backward(dout, q, k, v, out, lse, *how)]


def close(got: Tensor, exact: Tensor, tolerance: float) -> None:
    got = got.double().cpu()
    assert got.shape == exact.shape
    assert torch.equal(got.isfinite(), exact.isfinite())
    finite = exact.isfinite()
    if finite.any():
        assert (got - exact)[finite].abs().max() <= tolerance * exact[finite].abs().max() + 1e-30


def fused(name: str) -> list[Callable[..., None]]:
    """Return a fused operation as Triton's kernel, and on a GPU also as torch's operator, which the ring calls."""
    from rlexp.training.ring.kernels import fused, fused_triton

    operators = [getattr(fused_triton, name)]
    if HERE == "cuda":
        assert fused.fused(torch.zeros(1, device=DEVICE))
        operators.append(getattr(torch.ops.rlexp, name))
    return operators


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("size", [24, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_fused_merge_compiles_and_equals_plain_torch(dtype: torch.dtype, size: int) -> None:
    """Three blocks into rows of a larger output, one of them without keys for some queries."""
    for merge in fused("merge"):
        results = []
        for where, function in ((DEVICE, merge), (torch.device("cpu"), merge_plain)):
            out = torch.zeros(40, HEADS, size, device=where)
            lse = torch.full((HEADS, 40), -torch.inf, device=where).T
            for number in range(3):
                block_out = seeded(33, HEADS, size, seed=number).to(dtype)
                block_lse = seeded(HEADS, 33, seed=10 + number, dtype=torch.float32).T
                if number != 1:
                    block_lse[5:9], block_out[5:9] = -torch.inf, 0
                function(out[3:36], lse[3:36], block_out.to(where), block_lse.to(where))
            results.append((out.cpu(), lse.cpu()))
        for got, wanted in zip(*results, strict=True):
            assert torch.equal(got.isneginf(), wanted.isneginf())
            torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_fused_addition_compiles_and_equals_plain_torch(dtype: torch.dtype) -> None:
    """Into rows that lie together, and into rows by their index; keys and values are also given transposed."""
    from rlexp.training.ring.kernels.fused import _add_plain

    index = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:33]
    keys, values = (seeded(33, 2, size, seed=size).to(dtype) for size in (24, 16))
    turned = values.transpose(1, 2).contiguous().transpose(1, 2)  # its last dimension is not contiguous
    for add in fused("add_keys"):
        results = []
        for where, function in ((DEVICE, add), (torch.device("cpu"), _add_plain)):
            sums = [seeded(40, 2, size, dtype=torch.float32).to(where) for size in (24, 16)]
            function(sums[0][3:36], sums[1][3:36], None, keys.to(where), turned.to(where))
            function(*sums, index.to(where), keys.to(where), values.to(where))
            results.append([into.cpu() for into in sums])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@needs_triton
def test_the_fused_merge_counts_beyond_32_bits() -> None:
    """The output of half a million tokens has more than 2³¹ numbers."""
    heads, size = 32, 128
    tokens = 64 if HERE == "cpu" else (1 << 31) // (heads * size) + 64
    if HERE == "cuda" and torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 20 GiB of a GPU")
    out = torch.zeros(tokens, heads, size, device=DEVICE)
    lse, block_lse = (torch.zeros(tokens, heads, device=DEVICE) for _ in range(2))
    block = torch.ones(tokens, heads, size, device=DEVICE, dtype=torch.bfloat16)
    fused("merge")[0](out, lse, block, block_lse)  # equal shares
    for rows in (slice(0, 32), slice(-32, None)):
        assert torch.equal(out[rows].cpu(), torch.full((32, heads, size), 0.5))


@needs_triton
@pytest.mark.parametrize("dtype", PIECES, ids=str)
def test_the_fused_pieces_compile_and_equal_plain_torch(dtype: torch.dtype) -> None:
    """As Triton's kernels, and as the operators that a model calls."""
    from rlexp.training.model.fused import triton_kernels

    for kernels in (triton_kernels, torch.ops.rlexp):
        compare_pieces(kernels, dtype, DEVICE)


# ---- the head ----


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_heads_gradient_is_as_exact_in_many_pieces_as_in_one(dtype: torch.dtype, fused: bool) -> None:
    """Against float64. In bfloat16 a product of two matrices is added into float32 by an operator that CPUs lack."""
    tokens, vocabulary, width = 128 if fused and HERE == "cpu" else 1024, 512, 64  # the interpreter is slow
    weight, hidden = seeded(vocabulary, width).mul(0.1).to(dtype), seeded(tokens, width, seed=1).mul(0.1).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    held = Held.of(targets)
    exact = gradients(weight.double(), hidden.double(), held, tokens)
    held = Held.of(targets.to(DEVICE))
    errors = []
    for pieces in (1, 4, 64):
        got = gradients(weight.to(DEVICE), hidden.to(DEVICE), held, tokens // pieces, fused=fused)
        errors.append([float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)])
    bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert all(error < bound for each in errors for error in each), errors
    assert errors[2][1] <= 1.02 * errors[0][1] + 1e-6, "the weight's gradient grows less exact with the pieces"


def gradients(weight: Tensor, hidden: Tensor, held: Held, rows: int, *, fused: bool = False) -> list[Tensor]:
    """Return the log-probabilities, and the gradients of the weight and of the hidden states."""
    weight, hidden = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    head = HeadLogps(Wanted(), most=len(weight) * rows)
    head.fused = fused
    logps: Tensor = head(weight, None, hidden, held).logps_n  # type: ignore[arg-type, union-attr]
    factors = torch.linspace(-1, 1, len(hidden), device=logps.device)
    return [logps.detach(), *torch.autograd.grad((logps * factors).sum(), [weight, hidden])]


# ---- training ----


@pytest.mark.parametrize("engine", ["torch", "zero1"])
def test_a_reference_on_the_host_has_the_bits_of_one_on_the_device(engine: str) -> None:
    """Three steps of four micro-batches each. Layers are large enough that they are copied while others compute."""
    needs_of(engine)
    size = () if HERE == "cpu" else ("model.hidden_size=1024", "model.intermediate_size=4096", "model.layers=8")
    words = (f"engine={engine}", "train.precision=bf16", "launch.deterministic=true", "train.micro_batch_size=2", *size)
    cfgs = [composed(*words, f"reference.offload={kept}") for kept in ("false", "true")]
    one, other = on_ranks(1, _three_steps, cfgs)[0]
    assert one == other


def _three_steps(_spec: RankSpec, cfgs: Sequence[Config]) -> list[list[float]]:
    """Return the losses of each run, and what its reference says after them."""
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    found = []
    for cfg in cfgs:
        task: Any = build(cfg, around=UNPROBED)
        losses = [train_step(task, step)["train/loss"] for step in (1, 2, 3)]
        step = task.begin(4)
        said = task.reference.logps(step.load(0).shard)
        found.append(losses + said.tolist())
        assert (type(task.reference.frozen).__name__ == "Streamed") == cfg.reference.offload
    return found


@rings
@engines
def test_the_host_waits_for_nothing_in_a_micro_batch(engine: str, ring: int) -> None:
    """From the first micro-batch's start to the last backward's end, in the second step. With ZeRO-3 in forward passes
    alone: DeepSpeed waits for a stream of its own at the end of each backward pass."""
    needs_of(engine)
    words = (f"engine={engine}", "train.precision=bf16", "memory.checkpointing=true")
    cfgs = [composed(*words, *more, ring=ring) for more in ((), ("adapter=lora",), ("reference.offload=true",))]
    for watched in on_ranks(ring, _all_without_waiting, cfgs):
        assert all(modes[0] == "error" and modes[-1] == "default" for modes in watched)


def _all_without_waiting(spec: RankSpec, cfgs: Sequence[Config]) -> list[list[str]]:
    return [_without_waiting(spec, cfg) for cfg in cfgs]


def _without_waiting(_spec: RankSpec, cfg: Config) -> list[str]:
    """Take two steps; in the second torch raises where the host waits. Return which modes were set."""
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task = build(cfg, around=UNPROBED)
    modes: list[str] = []

    def mode(name: str) -> None:
        modes.append(name)
        if HERE == "cuda":
            torch.cuda.set_sync_debug_mode(name)

    train_step(task, 1)  # compiles kernels; in its first step ZeRO-3 asks whether all ranks call the same modules
    task.run = dataclasses.replace(task.run, engine=_Watched(task.run.engine, mode))
    begin = task.begin

    def begins(*args: Any) -> Any:
        step = begin(*args)
        mode("error")
        return step

    task.begin = begins  # type: ignore[method-assign]
    try:
        train_step(task, 2)
    finally:
        if HERE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return modes


class _Watched:
    """An engine after whose last backward pass the host may wait again."""

    def __init__(self, engine: Any, mode: Callable[[str], None]) -> None:
        self._engine, self._mode = engine, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        own = self._engine.name == "zero3"
        if own:
            self._mode("default")
        self._engine.backward(loss, last=last)
        if last or own:
            self._mode("default" if last else "error")


@pytest.mark.skipif(HERE == "cpu", reason="the CPU has nothing to wait for")
def test_a_planted_wait_raises() -> None:
    cfg = composed("engine=torch", "train.precision=bf16")
    with pytest.raises(Exception, match="synchroniz"):
        on_ranks(1, _planted, cfg)


def _planted(spec: RankSpec, cfg: Config) -> list[str]:
    plant("rlexp.training.model.policy:hidden_states", _asked, lambda: None)
    return _without_waiting(spec, cfg)


def _asked(original: Any, *args: Any) -> Tensor:
    hidden: Tensor = original(*args)
    return hidden if bool(hidden.isfinite().all()) else hidden * 0


@pytest.mark.parametrize("rank", [0, 1])
def test_no_gradient_is_given_away_while_it_is_reduced(rank: int) -> None:
    """DeepSpeed reduces on a stream of its own, here after a sleep: as the owner of some matrices and not of others."""
    needs_of("zero2")
    (found,) = on_ranks(1, parted, as_rank, (HERE, WIDTH, USUAL, rank))
    for words, case in zip(USUAL, found, strict=True):
        hold(words, case)


def test_zero2_gives_a_gradient_away_while_it_is_reduced_if_nobody_keeps_it() -> None:
    """If this fails, DeepSpeed keeps it by itself, and `_KeptGradient` can go."""
    needs_of("zero2")
    ((found,),) = on_ranks(1, parted, given_away, (HERE, WIDTH))
    assert found.lost or found.written


def given_away(device: str, width: int) -> list[Found]:
    return as_rank(device, width, USUAL[:1], 0, keeping=False)


# ---- another library's ring ----


@pytest.mark.skipif(
    HERE == "cpu" or not (installed("flash_attn") and find_spec("ring_flash_attn")),
    reason="flash-attn 2 and ring-flash-attn are not installed; over a mock, tests/training/ring compares them",
)
def test_ring_flash_attn_is_our_layouts_to_the_rounding_of_bfloat16() -> None:
    """On rings of 2 and 4. Ranks share a GPU where there are fewer than four."""
    launch = launch_on(HERE, 120.0, ranks_per_gpu=-(-4 // GPUS))
    for of_rank in run_ranks(_beside_library, 4, (launch,), device=HERE, preload=PRELOAD, timeout=500.0):
        assert of_rank == []


def _beside_library(spec: RankSpec, launch: LaunchConfig) -> list[str]:
    join(spec, launch)
    found = [gap for size in (2, 4) for gap in gaps(size, DEVICE, kernel="flash_attn")]
    return [wrong for gap in found for wrong in gap.wrong]


# ---- predictions ----


@engines
def test_the_measured_peak_is_the_predicted_one(tmp_path: Path, engine: str) -> None:
    """Within 5 % or 0.25 GiB, whichever is more: cuBLAS's workspaces are not predicted. On the CPU, within 2 %."""
    needs_of(engine)
    shape = dataclasses.replace(gpu_training.SHAPES[-1], layers=gpu_training.LAYERS.start)
    if HERE == "cpu":
        trial = gpu_training.Trial.of(stand_in(), tmp_path)
    else:
        trial = gpu_training.Trial(machine(), shape, 4096, tmp_path).written()
    option = Option(engine, "true", "none")
    (said,) = foretell([trial.asked(option)])
    assert said.failed is None
    result = gpu_training.measure_all(trial, {option: trial.here(option)}, steps=2)[option]
    assert "failed" not in result, result
    predicted, got = max(said.peaks.values()), max(result["peaks"].values())
    assert gpu_training.right(predicted, got), (predicted, got)
    if HERE == "cpu":
        assert got == pytest.approx(predicted, rel=0.02)
