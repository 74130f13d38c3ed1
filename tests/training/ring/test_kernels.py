"""The kernels for CUDA, over a mock: which is chosen, how it is called, and what becomes of its result.

The real ones run in tests/bench/test_gpu.py.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import tomllib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from bench.flash_attn_2 import PART
from bench.simulate import call_of
from rlexp.base import kernel_needs as needs
from rlexp.base import kernel_rates as rates
from rlexp.base.errors import ConfigError, ModelError
from rlexp.config import hardware
from rlexp.config.checks import kernel as checks
from rlexp.config.checks.layout import Heads, heads_of
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, Device, HFModelConfig, KernelName, TinyModelConfig
from rlexp.config.schema.models import Precision
from rlexp.training.ring import kernels
from rlexp.training.ring.kernels import (
    BlockKernel,
    Plain,
    available,
    computing_in,
    flash_attn_4,
    get_kernel,
    varlen,
)
from rlexp.training.train import build
from rlexp.training.train.surroundings import Surroundings
from rlexp.verify.profiles import exact
from tests.helpers.attention import CALLS, launches_of, named_call
from tests.helpers.mock_flash import MockFlash
from tests.helpers.paths import ROOT
from tests.helpers.programs import python
from tests.helpers.ranks import seeded

HEADS, SIZE, SCALE = 8, 16, 0.25
LSE = 1  # the place of the log-sum-exp among the five results of both passes
FLASH = ("torch_flash", "flash_attn", "flash_attn_3", "flash_attn_4")


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockFlash]:
    """A mock in the place of all four kernels."""
    flash = MockFlash()
    monkeypatch.setattr(kernels.flash, "_torch_forward", flash.aten_forward)
    monkeypatch.setattr(kernels.flash, "_torch_backward", flash.aten_backward)
    for name in ("flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, flash)
    _forget()
    on_cpu = torch.library.Library("rlexp", "IMPL", "CPU")  # the operators are a GPU's alone
    on_cpu.impl("flash_attn_4_forward", flash_attn_4.forward)
    on_cpu.impl("flash_attn_4_backward", flash_attn_4.backward)
    yield flash
    on_cpu._destroy()
    _forget()


def _forget() -> None:
    for interface in (kernels.flash.second, kernels.flash.third, flash_attn_4._interface):
        interface.cache_clear()


# ---- results ----


def blocks(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], kv_heads: int) -> list[Tensor]:
    """Return q, k, v, and the ring's output, its gradient, and a log-sum-exp that is larger than the block's."""
    queries, keys = sum(q_lengths), sum(k_lengths)
    found = [
        seeded(tokens, heads, SIZE, seed=number, dtype=torch.bfloat16)
        for number, (tokens, heads) in enumerate(
            ((queries, HEADS), (keys, kv_heads), (keys, kv_heads), (queries, HEADS), (queries, HEADS))
        )
    ]
    return [*found, math.log(1 + keys) + 1 + seeded(queries, HEADS, seed=9, dtype=torch.float32).abs()]


def both_passes(kernel: BlockKernel, name: str, kv_heads: int, arrange: Any = lambda x: x) -> list[Tensor]:
    call = named_call(name)
    q, k, v, out, dout, lse = blocks(call.queries.lengths, call.keys.lengths, kv_heads)
    q, k, v, out, dout, lse = (arrange(x) for x in (q, k, v, out, dout, lse))
    return [*kernel.forward(q, k, v, call, SCALE), *kernel.backward(dout, q, k, v, out, lse, call, SCALE)]


@pytest.mark.parametrize("name", FLASH)
def test_equals_the_plain_kernel(mock: MockFlash, name: str) -> None:
    """They agree to the rounding of bfloat16 results, 2⁻⁹ of each number.

    The log-sum-exp, by whose exponential blocks are merged, is never rounded to bfloat16.
    """
    for call in CALLS:
        for kv_heads in (HEADS, 2, 1):
            before = mock.calls
            got = both_passes(get_kernel(name, "cuda"), call, kv_heads)
            assert mock.calls - before == 2 * launches_of(named_call(call)), call
            for part, (a, b) in enumerate(zip(got, both_passes(Plain(), call, kv_heads), strict=True)):
                assert a.shape == b.shape
                assert a.dtype == torch.float32 or (part != LSE and a.dtype == torch.bfloat16)
                rtol = 1e-6 if part == LSE else 2**-8
                assert torch.allclose(a.float(), b, rtol=rtol, atol=1e-5), (call, kv_heads, part)


def test_the_cpu_kernel_equals_the_plain_one() -> None:
    """They take the same calls in float32, and are 5.8e-7 apart at most."""
    for call in CALLS:
        for kv_heads in (HEADS, 2, 1):
            got, expected = (both_passes(get_kernel(name, "cpu"), call, kv_heads) for name in ("cpu_flash", "plain"))
            for part, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert a.shape == b.shape
                assert torch.allclose(a, b, rtol=4e-6, atol=4e-6), (call, kv_heads, part)


@pytest.mark.parametrize("name", FLASH)
def test_any_memory_layout_is_passed_on_right(mock: MockFlash, name: str) -> None:
    def permuted(x: Tensor) -> Tensor:
        order = (2, 0, 1) if x.dim() == 3 else (1, 0)
        back = (1, 2, 0) if x.dim() == 3 else (1, 0)
        return x.permute(order).contiguous().permute(back)

    for call in ("packed", "holes"):
        kernel = get_kernel(name, "cuda")
        for a, b in zip(both_passes(kernel, call, 2), both_passes(kernel, call, 2, permuted), strict=True):
            assert torch.equal(a, b)


def test_one_sided_segments_are_left_out_without_a_copy_where_possible() -> None:
    cpu = torch.device("cpu")
    chunks = call_of((4, 6), (0, 9), False)  # the first rank's, as in allgather
    (early,) = varlen.spans_of(chunks, cpu)
    assert (early.queries, early.keys) == (slice(4, 10), slice(0, 9))
    assert [x.tolist() if isinstance(x, Tensor) else x for x in early.bounds] == [[0, 6], [0, 9], 6, 9]
    (holes,) = varlen.spans_of(call_of((4, 0, 2, 3), (3, 5, 0, 7), False), cpu)
    assert [at.tolist() for at in (holes.queries, holes.keys) if isinstance(at, Tensor)] == [
        [0, 1, 2, 3, 6, 7, 8],
        [0, 1, 2, *range(8, 15)],
    ]
    alike = call_of((4, 6), (0, 9), False)
    get_kernel("torch_flash", "cuda").prepare([chunks, alike], cpu)
    assert varlen.spans_of(alike, cpu)[0] is varlen.spans_of(chunks, cpu)[0] is early, "all layers of a model share it"
    kept = weakref.ref(early.bounds[0])
    del chunks, alike, early
    assert kept() is None, "it goes with its pack"


def test_segments_equally_far_apart_are_one_launch() -> None:
    """A kernel's window is counted from the end of queries and keys, where they are `apart`."""
    call = call_of((4, 6, 3), (5, 9, 3), False, 8, (0, 0, 5))
    own, halo = varlen.spans_of(call, torch.device("cpu"))
    assert (own.window, halo.window) == ((7, 0), (2, 5))
    assert (own.queries, own.keys, halo.queries, halo.keys) == (
        slice(0, 10),
        slice(0, 14),
        slice(10, 13),
        slice(14, 17),
    )


BACKWARD = {"flash_attn": "_flash_attn_varlen_backward", "flash_attn_3": "_flash_attn_backward",
            "flash_attn_4": "_flash_attn_bwd"}  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_are_deterministic_where_that_is_asked_for(
    mock: MockFlash, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Their forward passes always are. torch's own backward pass takes no argument: it reads torch's global setting."""
    seen: dict[str, Any] = {}
    for name, function in BACKWARD.items():
        own = getattr(mock, function)

        def watched(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            seen[name] = kwargs["deterministic"]
            return own(*args, **kwargs)

        monkeypatch.setattr(mock, function, watched)
    torch.use_deterministic_algorithms(asked)
    try:
        for name in FLASH:
            both_passes(get_kernel(name, "cuda"), "packed", 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {*FLASH} == {*BACKWARD, "torch_flash"}
    assert seen == dict.fromkeys(BACKWARD, asked)
    schema = torch.ops.aten._flash_attention_backward.default._schema
    assert not any("deterministic" in argument.name for argument in schema.arguments)


def test_torchs_operators_take_the_arguments_of_our_calls() -> None:
    """Call their functions for shapes, which check the parameters; the log-sum-exp over the pack is (H, T)."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    q, k = torch.empty(10, HEADS, SIZE, **meta), torch.empty(14, 2, SIZE, **meta)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device="meta")
    out, lse, rng_state, *_ = torch.ops.aten._flash_attention_forward(
        q, k, k, cu, cu, 6, 9, 0.0, False, False, scale=1.0
    )
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((HEADS, 10), torch.float32)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.uint64)
    kernel = get_kernel("torch_flash", "cuda")
    call = call_of((4, 6), (5, 9), False)
    got_out, got_lse = kernel.forward(q, k, k, call, 1.0)
    assert (got_out.shape, got_lse.shape) == (q.shape, (10, HEADS))
    grads = kernel.backward(q, q, k, k, q, got_lse, call, 1.0)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, torch.bfloat16) for x in (q, k, k)]


# ---- the choice ----


@functools.cache
def composed() -> Config:
    return compose_config(["launch.device=cpu"])


def a_config() -> Config:
    """Return a configuration that a test may change."""
    return copy.deepcopy(composed())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mock of a machine: its GPU's generation, and the installed kernels."""

    def mocked(major: int, *installed: int) -> None:
        monkeypatch.setattr(kernels, "generation_here", lambda: major)
        there = {"torch_flash", *({2: "flash_attn"}.get(number, f"flash_attn_{number}") for number in installed)}
        monkeypatch.setattr(kernels, "installed", lambda name: name in there)

    return mocked


def test_auto_takes_the_fastest_kernel_available(machine: Any) -> None:
    def names(dtype: torch.dtype, head_size: int | None = None) -> list[str]:
        found = available("cuda", dtype, head_size)
        assert get_kernel("auto", "cuda", dtype, head_size).name == found[0].name
        return [kernel.name for kernel in found]

    machine(9, 2, 3, 4)
    assert names(torch.bfloat16) == ["flash_attn_4", "flash_attn_3", "flash_attn", "torch_flash", "plain"]
    assert names(torch.float16, 128) == names(torch.bfloat16)
    assert names(torch.bfloat16, 12) == ["plain"]
    assert names(torch.float32) == names(torch.float64) == ["plain"]
    machine(10, 2, 3, 4)
    assert names(torch.bfloat16) == ["flash_attn_4", "flash_attn", "torch_flash", "plain"]
    assert names(torch.bfloat16, 256) == ["flash_attn", "torch_flash", "plain"]
    machine(12, 4)
    assert names(torch.bfloat16) == ["torch_flash", "flash_attn_4", "plain"], "nothing is known of its speed there"
    machine(8, 3, 4)
    assert names(torch.bfloat16) == ["torch_flash", "plain"]
    machine(7, 2)
    assert names(torch.bfloat16) == ["plain"]
    assert get_kernel("auto", "cpu", torch.bfloat16).name == "cpu_flash"


def test_every_name_has_a_kernel_with_its_dtypes() -> None:
    for name in KernelName:
        kernel = get_kernel(name.value, "cpu")
        assert kernel.name == ("cpu_flash" if name is KernelName.auto else name.value)
        half_only = name.value in needs.NEEDS
        assert (torch.float64 in kernel.dtypes) is not half_only
        assert computing_in(torch.bfloat16, kernel) is kernel
        assert computing_in(torch.float64, kernel).name == ("plain" if half_only else kernel.name)
        assert computing_in(torch.bfloat16, kernel, head_size=20).name == ("plain" if half_only else kernel.name)
        assert computing_in(torch.bfloat16, kernel, head_size=64) is kernel
    with pytest.raises(ValueError, match="no kernel flash"):
        get_kernel("flash", "cpu")


@pytest.mark.skipif(needs.installed("flash_attn_3"), reason="flash-attn 3 is there")
@pytest.mark.parametrize("third", ["flash_attn_interface.py", "flash_attn_3/flash_attn_interface.py"])
def test_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, third: str) -> None:
    for name, file in (
        ("flash_attn", "flash_attn_2_cuda.py"),
        ("flash_attn_3", third),
        ("flash_attn_4", "flash_attn_4-4.0.0.dist-info/METADATA"),
    ):
        if needs.installed(name):
            continue  # really
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text("Name: flash-attn-4\nVersion: 4.0.0\n" if "dist" in file else "HERE = 3")
        monkeypatch.syspath_prepend(tmp_path / name)
        assert needs.installed(name)
        _forget()
    assert kernels.flash.third().HERE == 3
    _forget()
    assert needs.installed("torch_flash")
    monkeypatch.setitem(needs.NEEDS, "a module", needs.Needs({}, modules=("no_such_module", "nor_this")))
    monkeypatch.setitem(needs.NEEDS, "a package", needs.Needs({}, distribution="no-such-package"))
    assert not needs.installed("a module")
    assert not needs.installed("a package")


def install_a_part(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Install flash-attn 2 as a wheel of `bench.flash_attn_2` does, without its code."""
    about = folder / f"flash_attn-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Name: flash-attn\nVersion: {version}\n", encoding="utf-8")
    (folder / "flash_attn_2_cuda.py").touch()
    monkeypatch.syspath_prepend(folder)


def test_a_part_of_flash_attn_takes_the_heads_that_it_was_built_for(monkeypatch, tmp_path: Path) -> None:
    install_a_part(tmp_path, monkeypatch, f"2.8.3.post2+{PART}.sm90")
    assert needs.built("flash_attn") == ("2.8.3.post2+bf16.d64.d128.sm90", {64, 128})
    assert [size for size in (32, 64, 96, 128, 256) if needs.takes("flash_attn", size, 9)] == [64, 128]
    assert needs.fits("flash_attn", 96, 9), "what another build takes, as of a GPU that is not here"
    taken = {size: [kernel.name for kernel in kernels.available("cuda", torch.bfloat16, size, generation=9)]
             for size in (64, 96)}  # fmt: skip
    assert "flash_attn" in taken[64]
    assert "flash_attn" not in taken[96]
    cfg = compose_config(["launch.device=cpu"])
    cfg.launch.device, cfg.train.precision = Device.cuda, Precision.bf16
    cfg.parallel.kernel = KernelName.flash_attn
    checks.check_kernel(cfg, Heads(8, 8, 64))
    cannot = r"parallel.kernel=flash_attn: the installed version 2.8.3.post2\+bf16.d64.d128.sm90 has heads of 64 " \
             r"and 128 only, and the model's are 96. Use .*parallel.kernel=torch_flash"  # fmt: skip
    with pytest.raises(ConfigError, match=cannot):
        checks.check_kernel(cfg, Heads(8, 8, 96))
    checks.check_kernel(cfg, Heads(8, 8, 96), here=False)


@pytest.mark.parametrize("version", ["2.8.3", "2.8.3.post2", "2.8.3+cu13torch2.11cxx11abiTRUE"])
def test_a_whole_flash_attn_takes_all_heads(monkeypatch, tmp_path: Path, version: str) -> None:
    install_a_part(tmp_path, monkeypatch, version)
    assert needs.built("flash_attn") is None
    assert needs.takes("flash_attn", 96, 9)
    assert not needs.takes("flash_attn", 264, 9)


@pytest.mark.parametrize(
    ("kernel", "device", "precision", "said"),
    [
        ("cpu_flash", "cuda", "bf16", "parallel.kernel=cpu_flash: runs on CPU only, and launch.device=cuda. Use"),
        *((name, "cpu", "bf16", f"{name}: runs on GPUs only, and launch.device=cpu. Use") for name in FLASH),
        *((name, "cuda", "fp32", f"{name}: computes in 16 bits only, and train.precision=fp32. Use") for name in FLASH),
        ("torch_flash", "cuda", "fp64", "train.precision=fp64. Use parallel.kernel=auto"),
        ("flash_attn", "cuda", "bf16", "not installed. Install it with `pip install -e '.[flash]'`"),
        ("flash_attn_3", "cuda", "bf16", "not installed. Build it from the folder hopper"),
        ("flash_attn_4", "cuda", "bf16", "not installed in version 4.0.0b36 or later. Install it with `pip install "
                                         "'flash-attn-4[cu13]>=4.0.0b36'`, or use parallel.kernel=plain, or parallel."),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernel: str, device: str, precision: str, said: str
) -> None:
    cfg = a_config()
    cfg.parallel.kernel, cfg.launch.device, cfg.train.precision = (
        KernelName[kernel],
        Device[device],
        Precision[precision],
    )
    monkeypatch.setattr(checks, "installed", lambda _: False)
    monkeypatch.setattr(checks, "gpu_generations", set)
    with pytest.raises(ConfigError) as error:
        checks.check_kernel(cfg, None)
    assert said in str(error.value)
    if "not installed" in said:
        checks.check_kernel(cfg, None, here=False)  # on the nodes it may be
        monkeypatch.setattr(checks, "installed", lambda _: True)
        checks.check_kernel(cfg, None)


@pytest.mark.parametrize(
    ("kernel", "there", "said"),
    [
        (
            "flash_attn_4",
            {8},
            "of compute capability 9 to 12, and this run's have 8. Use parallel.kernel=torch_flash, "
            "parallel.kernel=flash_attn, parallel.kernel=plain, or parallel.kernel=auto, which",
        ),
        ("flash_attn_3", {8, 10}, "of compute capability 9, and this run's have 8 and 10. Use "),
        ("torch_flash", {7}, "of compute capability 8 and above, and this run's have 7. Use parallel.kernel=plain, or"),
        ("flash_attn", {7, 8}, None),  # one of them can
        ("flash_attn_3", set(), None),  # nobody can say
    ],
)
def test_a_kernel_for_other_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernel: str, there: set[int], said: str | None
) -> None:
    """Otherwise flash-attn 4 would run forward on an Ampere, and fail in the first backward pass."""
    cfg = a_config()
    cfg.launch.device, cfg.train.precision, cfg.parallel.kernel = Device.cuda, Precision.bf16, KernelName[kernel]
    monkeypatch.setattr(checks, "installed", lambda _: True)
    monkeypatch.setattr(checks, "gpu_generations", lambda: there)
    if said is None:
        checks.check_kernel(cfg, None)
        return
    with pytest.raises(ConfigError) as error:
        checks.check_kernel(cfg, None)
    assert said in str(error.value)
    checks.check_kernel(cfg, None, here=False)  # the nodes may have others
    checks.check_kernel(cfg, None, generation=min(needs.NEEDS[kernel].heads))  # a rank knows its own
    with pytest.raises(ConfigError, match="this run's have 7"):
        checks.check_kernel(cfg, None, generation=7)
    cfg.hardware.generation = 7
    with pytest.raises(ConfigError, match="this run's have 7"):
        checks.check_kernel(cfg, None, here=False)


def test_the_driver_says_what_its_gpus_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the test's own nvidia-smi."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --query-gpu=compute_cap ] && printf '9.0\\n9.0\\n12.1\\n[N/A]\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_generations() == {9, 12}
    monkeypatch.setenv("PATH", "")
    assert hardware.gpu_generations() == set()


def test_sizes_of_heads_that_kernels_take() -> None:
    def taken(name: str, generation: int | None) -> list[int]:
        return [size for size in (4, 8, 12, 64, 128, 136, 256, 264) if needs.fits(name, size, generation)]

    up_to = {128: [8, 64, 128], 256: [8, 64, 128, 136, 256], 0: []}
    for name in FLASH:
        assert taken(name, None) == up_to[256]
        assert taken(name, 9) == up_to[256]
        assert taken(name, 7) == []
    by_generation = {8: 0, 10: 128, 11: 128, 12: 128, 13: 0}
    assert {each: taken("flash_attn_4", each) for each in by_generation} == {
        each: up_to[most] for each, most in by_generation.items()
    }
    assert needs.fits("plain", 1, 7)


@given(
    generation=st.sampled_from([None, *range(7, 14)]), size=st.sampled_from([None, *range(8, 300, 4)]),
    tokens=st.integers(1, 1 << 20), there=st.sets(st.sampled_from(FLASH)), half=st.booleans(), exact=st.booleans(),
)  # fmt: skip
def test_auto_takes_a_kernel_that_fits(
    generation: int | None, size: int | None, tokens: int, there: set[str], half: bool, exact: bool
) -> None:
    """For a rehearsal of other hardware as for this machine: one whose package is here, or one without a package."""
    dtype = torch.bfloat16 if half else torch.float32
    torch.use_deterministic_algorithms(exact)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(kernels, "installed", there.__contains__)
            kernel = get_kernel("auto", "cuda", dtype, size, tokens=tokens, generation=generation)
            best, *others = [each.name for each in available("cuda", dtype, size, tokens=tokens, generation=generation)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.name == best
    assert dtype in kernel.dtypes
    assert (best == "plain") == (not others)
    if best == "plain":
        assert not half or not any(needs.fits(name, size or 8, generation) for name in there), "one that fits was left"
        return
    assert best in there
    assert size is None or needs.fits(best, size, generation)
    assert not (exact and generation in needs.NEEDS[best].varies)
    assert [best, *others[:-1]] == rates.ranked([best, *others[:-1]], generation, size, tokens)


def test_versions_of_a_package_are_compared() -> None:
    ordered = ["4.0.0b5", "4.0.0b36", "4.0.0", "4.0.1b2", "4.1.0", "5.0"]
    assert sorted(ordered, key=needs._ordered) == ordered
    assert needs._ordered("4.0.0") == needs._ordered("4.0.0.post1")


def test_the_extra_is_what_the_kernel_needs() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (asked,) = extra["gpu"]
    assert asked.partition(";")[0].strip() == needs.FLASH_ATTN_4
    assert needs.FLASH_ATTN_4.endswith(f">={needs.NEEDS['flash_attn_4'].least}")


def test_heads_that_a_kernel_cannot_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = a_config()
    cfg.launch.device, cfg.train.precision = Device.cuda, Precision.bf16
    monkeypatch.setattr(checks, "installed", lambda _: True)
    for size, kernel, generation, said in (
        (12, "torch_flash", None, "at most 256, and the model's is 12. Use parallel.kernel=plain, or"),
        (264, "flash_attn", None, "at most 256, and the model's is 264. Use parallel.kernel=plain, or"),
        (264, "flash_attn_4", None, "at most 256, and the model's is 264. Use parallel.kernel=plain, or"),
        (192, "flash_attn_4", 10, "at most 128 on GPUs of compute capability 10, and the model's is 192. Use "
                                  "parallel.kernel=torch_flash, parallel.kernel=flash_attn, parallel.kernel=plain, or"),
        (192, "flash_attn_4", 9, None),
    ):  # fmt: skip
        cfg.model = TinyModelConfig(name="tiny", hidden_size=8 * size, heads=8, kv_heads=2)
        cfg.parallel.kernel = KernelName[kernel]
        if said is None:
            checks.check_kernel(cfg, heads_of(cfg.model), generation=generation)
            continue
        with pytest.raises(ConfigError) as error:
            checks.check_kernel(cfg, heads_of(cfg.model), generation=generation)
        assert f"{kernel}: takes heads whose size is a multiple of 8 and {said}" in str(error.value)


def test_a_kernel_whose_gradients_vary_is_refused_in_a_deterministic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = a_config()
    cfg.launch.device, cfg.train.precision, cfg.parallel.kernel = Device.cuda, Precision.bf16, KernelName.flash_attn_4
    monkeypatch.setattr(checks, "installed", lambda name: name != "flash_attn")
    checks.check_kernel(cfg, None, generation=12)
    cfg.launch.deterministic = True
    checks.check_kernel(cfg, None, generation=10)
    with pytest.raises(ConfigError) as error:
        checks.check_kernel(cfg, None, generation=12)
    assert "no deterministic backward pass on GPUs of compute capability 12, and launch.deterministic=true. Use " \
        "parallel.kernel=torch_flash, parallel.kernel=plain, or" in str(error.value)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "there", "size", "said"),
    [
        ("flash_attn_3", False, 64, "its package is not installed"),
        ("flash_attn_4", True, 264, "at most 256, and the model's is 264"),
    ],
)
def test_ranks_refuse_what_was_unknown_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: str, there: bool, size: int, said: str
) -> None:
    """A cluster's node may lack packages, and the heads of a model on the hub are unknown before it starts."""
    cfg = a_config()
    cfg.launch.device, cfg.train.precision, cfg.parallel.kernel = Device.cuda, Precision.bf16, KernelName[kernel]
    cfg.model = HFModelConfig(name="hf", path="some/model-of-the-hub")
    monkeypatch.setattr(checks, "installed", lambda _: there)
    described = LlamaConfig(num_attention_heads=4, head_dim=size)
    around = Surroundings()
    around.model_config = lambda *_: described
    with pytest.raises(ConfigError) as error:
        build.build(cfg, around=around)
    assert said in str(error.value)


def test_a_reference_with_heads_that_the_kernel_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes one that takes both; a named one is refused, and the message names those that take both."""
    cfg = a_config()
    cfg.launch.device, cfg.train.precision, cfg.reference.path = Device.cuda, Precision.bf16, "other"
    models = [(cfg.model, LlamaConfig(num_attention_heads=4, head_dim=size)) for size in (128, 256)]
    monkeypatch.setattr(kernels, "installed", lambda _: True)
    monkeypatch.setattr(build, "installed", lambda name: name != "flash_attn")
    around = Surroundings()
    around.generation = lambda _: 10
    assert build.kernel_for(cfg, models[:1], (), torch.device("cuda"), around).name == "flash_attn_4"
    assert build.kernel_for(cfg, models, (), torch.device("cuda"), around).name != "flash_attn_4"
    cfg.parallel.kernel = KernelName.flash_attn_4
    with pytest.raises(ModelError) as error:
        build.kernel_for(cfg, models, (), torch.device("cuda"), around)
    assert str(error.value).endswith("heads of size 256, which the policy's kernel, flash_attn_4, does not take. Use "
                                     "parallel.kernel=torch_flash or parallel.kernel=plain.")  # fmt: skip
    build.kernel_for(cfg, models[:1], (), torch.device("cuda"), around)


@pytest.mark.parametrize(
    ("kernel", "exactly"), [("torch_flash", "plain"), ("auto", "auto"), ("cpu_flash", "cpu_flash")]
)
def test_verify_takes_a_kernel_that_computes_in_float64(kernel: str, exactly: str) -> None:
    cfg = a_config()
    cfg.parallel.kernel = KernelName[kernel]
    assert exact(cfg).parallel.kernel is KernelName[exactly]
    checks.check_kernel(exact(cfg), None)


def test_refused_from_the_command_line() -> None:
    with pytest.raises(ConfigError, match="torch_flash: runs on GPUs only"):
        compose_config(["launch.device=cpu", "parallel.kernel=torch_flash"])


def test_the_ring_needs_torch_alone() -> None:
    """So a benchmark runs where only torch is installed."""
    code = (
        "import importlib, pkgutil, sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'hydra', 'omegaconf', 'deepspeed', 'wandb', 'transformers'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import rlexp.training.ring, rlexp.training.types\n"
        "names = [each.name for each in pkgutil.walk_packages(rlexp.training.ring.__path__, 'rlexp.training.ring.')]\n"
        "for name in sorted(names): importlib.import_module(name)\n"
        "print(len(names), sorted(name for name in sys.modules if name.startswith('rlexp.config')))"
    )
    answer = python("-c", code)
    assert answer.returncode == 0, answer.stderr
    count, _, config = answer.stdout.strip().partition(" ")
    assert int(count) > 20
    assert config == "[]"
