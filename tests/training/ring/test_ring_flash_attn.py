"""The library ring-flash-attn as a backend: its real code on real ranks, over a mock of flash-attn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlexp.base.errors import ConfigError
from rlexp.config.checks import backend
from rlexp.config.checks.backend import check_backend
from rlexp.config.checks.layout import Heads
from rlexp.config.load import compose_config
from rlexp.config.schema import BackendName, Collectives, Config, LayoutName
from rlexp.config.schema.models import Precision
from rlexp.launch.joining import RankSpec, join, launch_on
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.training.dealer.packing import pack_sequences
from rlexp.training.ring.kernels import Plain
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import Layout
from rlexp.training.ring.layouts.ring_flash_attn import LibraryPlan, library_layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import ALONE, Ring, build_world
from rlexp.verify.profiles import exact
from tests.helpers import mock_flash
from tests.helpers.attention import HEADS, SIZE, error, expected_of, flash_error_of, inputs
from tests.helpers.beside_library import Gap, gaps
from tests.helpers.programs import python
from tests.helpers.ranks import largest_gap, on_ranks, seeded, train_steps

LAYOUTS = ("zigzag", "allgather")
LENGTHS = (1, 3, 37, 16, 101, 64, 5)  # one token, shorter than the ring, prime, round
LONG = (257, 1, 600)
NAMED = "parallel.backend=ring_flash_attn"
library = pytest.mark.skipif(
    find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed: pip install ring-flash-attn"
)


def forest(lengths: Sequence[int], layout: Layout, ring_size: int) -> tuple[Segment, ...]:
    """Return the segments of a pack of these lengths."""
    tokens = [torch.zeros(length, dtype=torch.int32).numpy() for length in lengths]
    pack = pack_sequences(
        [(each[:0], each) for each in tokens], layout.multiple(ring_size), unit=layout.unit(ring_size)
    )
    return pack.segments


# ---- attention, on ranks ----

CASES = [(name, kv_heads) for name in LAYOUTS for kv_heads in (2, 1)]
Parts = list[list[Tensor]]  # out, dq, dk, dv of each segment


@dataclasses.dataclass
class Attended:
    """One rank's results in one case."""

    index: Tensor  # the places in the pack that it holds
    parts: list[Tensor]  # out, dq, dk, dv
    counted: int  # bytes that `ring.traffic` counts
    sent: int  # bytes really sent
    work: float  # query-key pairs by the layout
    computed: float  # query-key pairs that flash-attn computes


def attend_rank(spec: RankSpec) -> dict[torch.dtype, list[Attended]]:
    """Attend on a ring of all ranks."""
    mock_flash.install()
    ring = ALONE if spec.world_size == 1 else build_world(spec.world_size).ring
    return {
        dtype: [attend_part(ring, name, kv_heads, lengths, dtype) for name, kv_heads in CASES]
        for dtype, lengths in (FINE, COARSE)
    }


FINE, COARSE = (torch.float64, LENGTHS), (torch.bfloat16, LONG)


def attend_part(ring: Ring, name: str, kv_heads: int, lengths: tuple[int, ...], dtype: torch.dtype) -> Attended:
    layout = library_layout(name)
    segments = forest(lengths, layout, ring.size)
    placement = layout.place(segments, ring.size)
    index = placement.places[ring.rank]
    total = sum(segment.padded for segment in segments)
    packed = []
    for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS)):
        # Padding looks like any token. No loss uses its output, which so has no gradient.
        whole = seeded(total, heads, SIZE, seed=9 + part, dtype=dtype) * (part < 3)
        for segment, tensors in zip(segments, inputs(lengths, kv_heads, dtype), strict=True):
            whole[segment.start : segment.start + segment.length] = tensors[part]
        packed.append(whole[index].transpose(0, 1).contiguous().transpose(0, 1))  # with a model's strides
    q, k, v, dout = packed
    for tensor in (q, k, v):
        tensor.requires_grad_()
    plan = layout.plan(segments, ring, Plain())
    flash_attn = mock_flash.install()
    sent, before, flash_attn.computed = Sent(), ring.traffic.sent, 0
    with sent.listening():
        out = plan.attend(q, k, v, Ask(SIZE**-0.5))
        grads = torch.autograd.grad(out, (q, k, v), dout)
    computed = flash_attn.computed / HEADS
    counted = ring.traffic.sent - before
    work = layout.work(segments, ring.size)[ring.rank]
    return Attended(index, [out.detach(), *grads], counted, sent.bytes, work, computed)


class Sent:
    """Count the bytes that a rank really sends, by any collective."""

    def __init__(self) -> None:
        self.bytes = 0

    def listening(self) -> Any:
        p2p, gather, scatter = dist.batch_isend_irecv, dist.all_gather_into_tensor, dist.reduce_scatter_tensor

        def batched(ops: list[Any]) -> Any:
            self.bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
            return p2p(ops)

        def gathered(output: Tensor, given: Tensor, **how: Any) -> Any:
            self.bytes += output.nbytes - given.nbytes
            return gather(output, given, **how)

        def scattered(output: Tensor, given: Tensor, **how: Any) -> Any:
            self.bytes += given.nbytes - output.nbytes
            return scatter(output, given, **how)

        return patch.multiple(
            dist, batch_isend_irecv=batched, all_gather_into_tensor=gathered, reduce_scatter_tensor=scattered
        )


@functools.cache
def attended(size: int) -> dict[torch.dtype, list[list[Attended]]]:
    """By dtype, each rank's results in each case."""
    by_rank = on_ranks(size, attend_rank)
    return {
        dtype: [list(results) for results in zip(*(said[dtype] for said in by_rank), strict=True)]
        for dtype in (FINE[0], COARSE[0])
    }


SIZES = pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])


def put_together(lengths: tuple[int, ...], name: str, results: Sequence[Attended]) -> Parts:
    segments = forest(lengths, library_layout(name), len(results))
    held = torch.cat([result.index for result in results])
    assert torch.equal(held.sort().values, torch.arange(len(held))), "each place is held exactly once"
    wholes = [torch.cat([result.parts[part] for result in results])[held.argsort()] for part in range(4)]
    return [[whole[s.start : s.start + s.length] for whole in wholes] for s in segments]


@library
@SIZES
def test_equals_full_attention(size: int) -> None:
    """In float64, but the library's zigzag merges outputs and sums gradients in float32.

    The largest difference measured is 3.3e-7 of the pack's largest element.
    """
    for (name, kv_heads), results in zip(CASES, attended(size)[torch.float64], strict=True):
        got, expected = put_together(LENGTHS, name, results), expected_of(LENGTHS, kv_heads, torch.float64)
        for part in range(4):
            largest = max(tensors[part].abs().max() for tensors in expected)
            gaps = [(a[part] - b[part]).abs().max() for a, b in zip(got, expected, strict=True)]
            assert max(gaps) / largest < 1e-6, (name, kv_heads, part)


@library
@SIZES
def test_bf16_is_about_as_exact_as_one_flash_call(size: int) -> None:
    """The error against float64 over the pack measured 0.24 to 0.98 times that of torch's own flash kernel.

    The mock does not round inside a block, as flash-attn does.
    """
    for (name, kv_heads), results in zip(CASES, attended(size)[torch.bfloat16], strict=True):
        got, expected = put_together(LONG, name, results), expected_of(LONG, kv_heads, torch.bfloat16)
        theirs = flash_error_of(LONG, kv_heads)
        ratios = (error(got, expected) / theirs).sqrt()
        assert (ratios < 1.05).all(), (name, kv_heads, ratios)
        assert (ratios > 0.1).all(), "a mock that rounds nothing would show nothing"


@library
@SIZES
def test_bytes_and_work_are_what_is_really_sent_and_computed(size: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for case, results in zip(CASES, attended(size)[dtype], strict=True):
            assert [each.counted for each in results] == [each.sent for each in results], case
            assert [each.work for each in results] == [each.computed for each in results], case
            assert all((each.sent > 0) == (size > 1) for each in results)


# ---- beside our own layouts, as `make gpu` has it on GPUs ----

CPU = torch.device("cpu")


def beside_rank(spec: RankSpec, rings: Sequence[int]) -> list[tuple[list[Gap], list[Gap]]]:
    """In bf16 our layouts have flash-attn's kernel too, by the operators that its package defines."""
    mock_flash.install()
    return [(gaps(size, CPU, torch.float64), gaps(size, CPU, kernel="flash_attn")) for size in rings]


def beside_a_wrong_one(spec: RankSpec) -> list[list[str]]:
    """Attend by a library that takes 2% larger keys, and by one whose zigzag loses what the first rank returns."""
    mock_flash.install()
    call = LibraryPlan.call
    larger = patch.object(LibraryPlan, "call", lambda plan, q, k, v, options: call(plan, q, 1.02 * k, v, options))
    lost = patch.object(LibraryPlan, "call", lambda plan, q, k, v, options: call(plan, q, k, v, options) * spec.rank)
    found = []
    for fault in (larger, lost):
        with fault:
            found.append([wrong for gap in gaps(2, CPU, several=(2,)) for wrong in gap.wrong])
    return found


@library
@pytest.mark.parametrize("rings", [(2,), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_it_computes_what_our_own_layouts_do(rings: tuple[int, ...]) -> None:
    """On rings of a world of as many ranks as the largest. In float64, only the library's zigzag merges in float32."""
    for found in on_ranks(max(rings), beside_rank, rings):
        for fine, coarse in found:
            assert [(gap.layout, gap.kv_heads) for gap in fine] == [(n, h) for n in LAYOUTS for h in (8, 2)]
            assert max(max(gap.apart) for gap in fine) < 1e-6
            assert [gap.wrong for gap in coarse] == [[]] * 4
            assert min(min(*gap.theirs, *gap.ours) for gap in coarse) > 2**-12, "what is not rounded shows nothing"


def beside_staged_rank(spec: RankSpec) -> list[str]:
    join(spec, launch_on("cpu", 100.0, collectives=Collectives.staged))
    mock_flash.install()
    return [
        wrong for size in (2, 4) for gap in gaps(size, CPU, kernel="flash_attn", several=(2,)) for wrong in gap.wrong
    ]


@library
@pytest.mark.slow
def test_it_does_where_ranks_share_a_gpu() -> None:
    """The library's own messages, gathers and sums go through the process group of ranks that share a GPU."""
    assert run_ranks(beside_staged_rank, 4, (), preload=PRELOAD, timeout=240.0) == [[]] * 4


@library
def test_a_library_that_computes_something_else_is_found() -> None:
    for larger, lost in on_ranks(2, beside_a_wrong_one):
        for layout in LAYOUTS:
            for part in ("out", "dq", "dk"):
                assert any(each.startswith(f"{layout}, 2 key/value heads, {part}: ") for each in larger), larger
        assert len(lost) == len(LAYOUTS) * 4


# ---- layouts, without the library ----

RINGS = st.sampled_from([1, 2, 3, 4, 8])
SEVERAL = st.lists(st.integers(1, 200), min_size=1, max_size=6).map(tuple)


@given(st.sampled_from(LAYOUTS), RINGS, SEVERAL, st.booleans())
def test_each_token_is_held_once_and_shares_are_equal(name, size, lengths, packing) -> None:
    layout = library_layout(name)
    tokens = [torch.zeros(length, dtype=torch.int32).numpy() for length in lengths]
    pack = pack_sequences(
        [(each[:0], each) for each in tokens], layout.multiple(size), unit=layout.unit(size), packing=packing
    )
    placement = layout.place(pack.segments, size)
    assert torch.equal(torch.cat(placement.places).sort().values, torch.arange(len(pack.tokens_T)))
    assert len({len(places) for places in placement.places}) == 1
    real = {place for s in pack.segments for place in range(s.start, s.start + s.length)}
    assert [len(real.intersection(places.tolist())) for places in placement.places] == list(placement.real)
    assert sum(placement.real) == sum(lengths)
    assert sum(layout.work(pack.segments, size)) >= sum(length * (length + 1) // 2 for length in lengths)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_empty_micro_batch_is_padding_alone(name: str, size: int) -> None:
    layout = library_layout(name)
    pack = pack_sequences([], layout.multiple(size), unit=layout.unit(size))
    placement = layout.place(pack.segments, size)
    assert torch.equal(torch.cat(placement.places).sort().values, torch.arange(layout.multiple(size)))
    assert placement.real == (0,) * size


def test_a_sequence_is_padded_to_what_the_layout_cuts_it_in() -> None:
    sequences = [(torch.arange(2).numpy(), torch.arange(length - 2).numpy()) for length in (3, 16, 17)]
    segments = pack_sequences(sequences, 8, unit=8).segments
    assert [(s.start, s.length, s.padded) for s in segments] == [(0, 3, 8), (8, 16, 16), (24, 17, 24)]
    unpacked = pack_sequences(sequences, 8, unit=8, packing=False).segments
    assert [s.padded for s in unpacked] == [24, 24, 24]
    assert [s.padded for s in pack_sequences(sequences, 8).segments] == [3, 16, 21]


# ---- whole runs ----


def run_rank(spec: RankSpec, configs: Sequence[Config]) -> list[Any]:
    """Train two steps of each, without the check that the machine can run the backend: flash-attn is a mock."""
    mock_flash.install()
    with patch("rlexp.training.train.build.check_backend", lambda *_: None):
        return [train_steps(spec, cfg, 2) for cfg in configs]


@library
@pytest.mark.slow
def test_a_run_is_that_of_our_own_layouts() -> None:
    """Layouts that pad and cut differently, a reference model, and recomputed activations, in float64.

    flash-attn's log-sum-exp is float32, and inside its operators no mode of ours widens it: gradients lie up to 2e-7 of
    their largest element apart. The library's zigzag merges in float32, too.
    """
    args = ["launch.device=cpu", "logger=none", "parallel=ring2", "engine=torch", "train.precision=fp64"]
    args += ["train.batch_size=4", "train.micro_batch_size=2", "memory.checkpointing=true", "optim=sgd", "optim.lr=0.1"]
    native = compose_config([*args, "train.max_steps=2", "parallel.layout=zigzag"])
    theirs = [
        dataclasses.replace(
            native, parallel=dataclasses.replace(native.parallel, backend=BackendName.ring_flash_attn, layout=layout)
        )
        for layout in (LayoutName.zigzag, LayoutName.allgather)
    ]
    (own, zigzag, allgather), _ = on_ranks(2, run_rank, [native, *theirs])
    tolerance = 1e-6  # five times what was measured
    for other in (zigzag, allgather):
        for mine, row in zip(own.rows, other.rows, strict=True):
            for metric in ("loss", "logps/chosen", "logps/rejected", "grad_norm"):
                assert row[f"train/{metric}"] == pytest.approx(mine[f"train/{metric}"], rel=tolerance)
            assert row["train/tokens"] == mine["train/tokens"]
            assert row["train/ring_bytes"] != mine["train/ring_bytes"], "the library attends"
        for mine, gradients in zip(own.gradients, other.gradients, strict=True):
            assert largest_gap(mine, gradients) < tolerance
        assert largest_gap(own.weights, other.weights) < tolerance
    assert [row["train/ring_balance"] for row in zigzag.rows] == [1.0, 1.0]
    # Equal pieces are not equal work: measured 1.05 and 1.06.
    assert all(row["train/ring_balance"] > 1.02 for row in allgather.rows)


def test_verify_takes_our_own_layout_in_float64() -> None:
    cfg = compose_config(["launch.device=cpu", "parallel=ring2"])
    cfg.parallel.backend, cfg.train.precision = BackendName.ring_flash_attn, Precision.bf16
    assert exact(cfg).parallel.backend is BackendName.native
    assert exact(cfg).parallel.layout is cfg.parallel.layout
    assert cfg.parallel.backend is BackendName.ring_flash_attn


# ---- the import ----

ENTERED = """
import sys
from tests.helpers import mock_flash
mock_flash.install()
interface = sys.modules["flash_attn.flash_attn_interface"]
interface._flash_attn_forward = interface._flash_attn_backward = None  # imported by modules that we do not use
try:
    import ring_flash_attn
except ImportError as error:
    print("refused:", error)
from rlexp.training.ring.layouts.ring_flash_attn import functions
for name in ("zigzag", "llama3", "llama3_plan", "alone"):
    function = getattr(functions(), name)
    print(function.__module__, function.__name__)
"""


@library
@pytest.mark.slow
def test_the_functions_are_reached_past_the_adapter() -> None:
    """When the package itself can be imported again, `functions` can import from it."""
    answer = python("-c", ENTERED)
    assert answer.returncode == 0, answer.stderr
    refused, *reached = answer.stdout.splitlines()
    assert refused.startswith("refused: cannot import name 'is_flash_attn_greater_or_equal_2_10'")
    assert reached == [
        "ring_flash_attn.zigzag_ring_flash_attn_varlen zigzag_ring_flash_attn_varlen_func",
        "ring_flash_attn.llama3_flash_attn_varlen llama3_flash_attn_varlen_func",
        "ring_flash_attn.llama3_flash_attn_varlen llama3_flash_attn_prepare_cu_seqlens",
        "tests.helpers.mock_flash flash_attn_varlen_func",
    ]


# ---- refusals ----

REFUSED = [
    ("parallel.layout=auto", "parallel.layout=auto compares rlexp's own layouts only. Use parallel.layout="),
    ("parallel.layout=ulysses", "parallel.layout=ulysses is not one of its layouts. Use parallel.layout=zigzag or "),
    ("parallel.layout=hybrid parallel.ulysses_size=2", "parallel.layout=hybrid is not one of its layouts"),
    ("parallel.layout=contiguous", "or parallel.layout=allgather, or parallel.backend=native."),
    ("parallel.kernel=plain", "always uses flash-attn's kernel, and parallel.kernel=plain names another. Leave"),
    ("launch.device=cpu", "runs on GPUs only, and launch.device=cpu. Use launch.device=cuda, or parallel.backend=nat"),
    ("train.precision=fp32", "cannot compute in train.precision=fp32. Use bf16, or parallel.backend=native."),
    ("train.precision=fp64", "cannot compute in train.precision=fp64. Use bf16"),
    ("model.hidden_size=96", "the model's heads are of size 12, and flash-attn needs a multiple of 8 up to 256. Use"),
    ("model.hidden_size=2176", "the model's heads are of size 272"),
]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as the test's own nvidia-smi reports it."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: a (UUID: x)'\necho 'GPU 1: b (UUID: y)'\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: object() if name in packages else None)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_what_it_cannot_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: str, said: str) -> None:
    installed(monkeypatch, "ring_flash_attn", "flash_attn_2_cuda")
    with pytest.raises(ConfigError, match=f"^{NAMED}: ") as error:
        compose_config([NAMED, "parallel=ring2", "parallel.layout=zigzag", *overrides.split()])
    assert said in str(error.value)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("there", "said"),
    [
        ((), "ring-flash-attn and flash-attn are not installed. Run `pip install -e '.[ring]'` in a checkout, or par"),
        (("ring_flash_attn",), "flash-attn is not installed. Run `pip install -e '.[ring]'` in a checkout"),
        (
            ("ring_flash_attn", "flash_attn"),
            "flash-attn is not installed. Run `pip install -e '.[ring]'` in a checkout",
        ),  # 4 is, and not 2
        (("flash_attn_2_cuda",), "ring-flash-attn is not installed. Run `pip install -e '.[ring]'` in a checkout"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], said: str) -> None:
    installed(monkeypatch, *there)
    with pytest.raises(ConfigError) as error:
        compose_config([NAMED, "parallel=ring2", "parallel.layout=zigzag"])
    assert str(error.value).startswith(f"{NAMED}: {said}")


@pytest.mark.usefixtures("gpus")
def test_what_it_can_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "ring_flash_attn", "flash_attn_2_cuda")
    for layout in LAYOUTS:
        cfg = compose_config([NAMED, "parallel=ring2", f"parallel.layout={layout}"])
        assert cfg.parallel.backend is BackendName.ring_flash_attn
        assert cfg.parallel.layout.value == layout


@pytest.mark.usefixtures("gpus")
def test_packages_are_asked_of_the_machine_that_runs_and_heads_when_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "ring_flash_attn", "flash_attn_2_cuda")
    cfg = compose_config([NAMED, "parallel=ring2", "parallel.layout=zigzag"])
    installed(monkeypatch)
    check_backend(cfg, None, here=False)
    with pytest.raises(ConfigError, match="not installed"):
        check_backend(cfg, None)
    with pytest.raises(ConfigError, match="heads are of size 20"):
        check_backend(cfg, Heads(8, 8, 20), here=False)
    check_backend(cfg, Heads(8, 8, 64, (None, cfg.data.max_length)), here=False)
    with pytest.raises(ConfigError, match=r"see 511 positions .* layouts all have them \(zigzag, "):
        check_backend(cfg, Heads(8, 8, 64, (None, cfg.data.max_length - 1)), here=False)
