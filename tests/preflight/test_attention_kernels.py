"""Rehearsals know each kernel: which one `auto` takes, what flash-attn 4 holds meanwhile, and how long it takes.

None of them needs the kernel's package, or a GPU.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.simulate import call_of
from rlexp.base import kernel_rates
from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.preflight.predict import plan_of
from rlexp.preflight.rehearsal.device import rehearsed_device
from rlexp.preflight.rehearsal.kernel_cost import rehearsed_kernel
from rlexp.preflight.rehearsal.log import Log, passes, peak_of
from rlexp.preflight.rehearsal.mode import Rehearsing
from rlexp.preflight.rehearsal.rates import DeviceClock, Rates
from rlexp.preflight.rehearsal.rehearse import rehearse
from rlexp.training.model.loading import load_config
from rlexp.training.ring import kernels
from rlexp.training.ring.kernels import USUAL, flash_attn_4
from tests.helpers.rehearsals import MODELS, alone, elsewhere, summary

H200 = ("hardware=h200", "launch.nproc=1", "parallel=ring1", "train.batch_size=1")
# By generation, head size, and whether the call is masked: queries and keys of a block, clusters, channels that are
# summed, as _flash_attn_bwd of flash_attn/cute/interface.py 4.0.0b36 has them.
BLOCKS = {
    (9, 64, True): (128, 128, 1, 64), (9, 72, False): (64, 128, 1, 96), (9, 128, True): (64, 128, 1, 128),
    (9, 128, False): (80, 128, 1, 128), (9, 136, True): (64, 96, 1, 192), (9, 256, True): (64, 48, 1, 256),
    (10, 64, True): (128, 128, 1, 64), (10, 128, False): (128, 128, 2, 128), (12, 128, True): (64, 64, 1, 128),
}  # fmt: skip


def made(
    lengths: list[int], heads: tuple[int, int], size: int, generation: int, *, causal: bool = True, window: int = 0,
    deterministic: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of the backward operator."""
    tokens, (queries, keys) = sum(lengths), heads
    q, k = (torch.empty(tokens, each, size, dtype=torch.bfloat16) for each in (queries, keys))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    options = (cu, cu, max(lengths), max(lengths), 1.0, causal, *((window, 0) if window else (None, None)))
    return (q, q, k, k, q, torch.empty(queries, tokens), *options, deterministic, generation)


def test_the_operators_return_what_the_package_returns() -> None:
    with FakeTensorMode():
        backward = made([5, 11], (8, 2), 64, 9)
        _, q, k, *_ = backward
        out, lse = torch.ops.rlexp.flash_attn_4_forward(q, k, k, *backward[6:14])
        assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((8, 16), torch.float32)
        grads = torch.ops.rlexp.flash_attn_4_backward(*backward)
        assert [(each.shape, each.dtype) for each in grads] == [(x.shape, torch.bfloat16) for x in (q, k, k)]


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_the_backward_pass_holds_what_the_package_allocates(
    case: tuple[int, int, bool], heads: tuple[int, int], deterministic: bool
) -> None:
    """Against the package's own expressions."""
    (generation, size, masked), (block, key_block, cluster, width) = case, BLOCKS[case]
    for lengths, window in (([300], 0), ([1, 127, 128, 129], 0), ([1000, 3, 50], 20 if masked else 0)):
        total, bounds, batch, (queries, keys) = sum(lengths), len(lengths) + 1, len(lengths), heads
        rounded = (total + bounds * block - 1) // block * block
        expected = queries * rounded * width + 2 * queries * rounded
        if queries > keys:
            together = cluster * key_block
            expected += 2 * keys * ((total + bounds * together - 1) // together * together) * width
        if deterministic:
            q_blocks, k_blocks = -(-max(lengths) // block), -(-max(lengths) // key_block)
            expected += batch * queries * q_blocks * cluster
            k_blocks += cluster == 2 and k_blocks % 2
            expected += 2 * batch * keys * k_blocks * 2 if queries > keys else 0
        given = made(
            lengths, heads, size, generation, causal=masked and not window, window=window, deterministic=deterministic
        )
        assert flash_attn_4.workspace(*given) == 4 * expected, lengths


def test_dq_of_a_long_sequence_is_summed_in_two_gibibytes() -> None:
    with FakeTensorMode():
        assert 2 << 30 < flash_attn_4.workspace(*made([131072], (32, 32), 128, 9)) < 2.04 * (1 << 30)


def _attended(kernel: str, cfg: Config) -> tuple[list[int], float, list[str]]:
    """Attend twice, in both passes; return the largest sum of bytes of each time, the seconds, and what is imported."""
    log = Log(rehearsed_device().type, clock=DeviceClock(Rates.of(cfg, 1)))
    peaks = []
    with Rehearsing(log):
        block = rehearsed_kernel(log, kernel, "rehearsed", torch.bfloat16, 128, *_usual(), 8192, 9)
        call = call_of((8192,), (8192,), True)
        q, k = (torch.empty(8192, each, 128, dtype=torch.bfloat16, device=rehearsed_device()) for each in (32, 8))
        block.prepare([call], q.device)
        for _ in range(2):
            log.sizes.clear()
            out, lse = block.forward(q, k, k, call, 1.0)
            block.backward(out, q, k, k, out, lse, call, 1.0)
            peaks.append(peak_of(log))
            del out, lse
    return peaks, log.clock.now, [name for name in sys.modules if name.startswith("flash_attn")]


def _usual() -> tuple[Any]:
    return (USUAL,)


def test_what_the_kernel_holds_is_counted_each_time() -> None:
    """Also when the rehearsal remembers what the operator returns."""
    (first, again), _, imported = alone(_attended, "flash_attn_4", elsewhere(*H200))
    q, k = 8192 * 32 * 128 * 2, 8192 * 8 * 128 * 2
    results = 2 * q + 2 * k + 8192 * 32 * 4  # out, dq, dk, dv, and the log-sum-exp
    own = 4 * (32 * 8256 * 130 + 2 * 8 * 8320 * 128)
    assert first == again
    assert first == results + own
    assert imported == []


def test_the_clock_runs_by_measured_rates() -> None:
    """The seconds of attention differ as the H200's rates do; flash-attn 2 is taken to be as fast as torch's copy."""
    cfg = elsewhere(*H200)
    seconds = {name: alone(_attended, name, cfg)[1] for name in ("torch_flash", "flash_attn", "flash_attn_4")}
    flops = 2 * 32 * 128 * (8192 * 8193 // 2)
    rates = {"torch_flash": (314, 274), "flash_attn_4": (674, 584)}
    slower, faster = (flops * sum(each / rate for each, rate in zip((4, 10), rates[name], strict=True)) / 1e12
                      for name in rates)  # fmt: skip
    assert seconds["torch_flash"] - seconds["flash_attn_4"] == pytest.approx(slower - faster, rel=1e-3)
    assert seconds["flash_attn"] == seconds["torch_flash"]


def _whole(cfg: Config) -> tuple[Any, float, list[str]]:
    log = rehearse(plan_of(cfg, load_config(cfg.model, cfg.data.max_length), 0, 1))
    return summary(passes(log)), log.clock.now, [name for name in sys.modules if name.startswith("flash_attn")]


@pytest.mark.skipif(kernel_rates.installed("flash_attn_4"), reason="flash-attn 4 is there")
def test_a_run_with_a_package_that_is_not_here_is_rehearsed() -> None:
    """`auto` is what this environment has, so that a run and its rehearsal take the same."""
    words = (*H200, "model=hf", f"model.path={MODELS / 'llama_8b'}", "data.max_length=8192", "engine=torch")
    named, auto = (alone(_whole, elsewhere(*words, f"parallel.kernel={each}")) for each in ("flash_attn_4", "auto"))
    assert named[0]["flops"] == auto[0]["flops"]
    assert named[1] < auto[1]
    assert named[2] == []


def test_auto_takes_the_same_kernel_in_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log("rehearsed")
    for there, generation, expected in (
        ({"torch_flash", "flash_attn_4"}, 9, "flash_attn_4"),
        ({"torch_flash", "flash_attn_4"}, 8, "torch_flash"),
        ({"torch_flash", "flash_attn_3"}, 9, "flash_attn_3"),
        ({"torch_flash"}, 10, "torch_flash"),
    ):
        monkeypatch.setattr(kernels, "installed", there.__contains__)
        asked = ("auto", "rehearsed", torch.bfloat16, 128, *_usual(), 8192, generation)
        kernel = rehearsed_kernel(log, *asked)
        assert kernel.name == kernels.get_kernel("auto", "cuda", *asked[2:]).name == expected
        assert kernel.kernel.name == ("torch_flash" if expected == "flash_attn_3" else expected), "called without it"


def test_hardware_that_cannot_run_the_kernel_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        elsewhere("hardware=a100", "parallel.kernel=flash_attn_4")
    assert "runs on GPUs of compute capability 9 to 12, and this run's have 8. Use parallel.kernel=torch_flash, " \
        "parallel.kernel=flash_attn, parallel.kernel=plain, or parallel.kernel=auto" in str(error.value)  # fmt: skip
