"""The rates of kernels: how they are read, compared, said at a run's start, and written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlexp.base import kernel_rates as rates
from rlexp.base.kernel_needs import FLASH_ATTN_4, NEEDS, able
from rlexp.base.kernel_rates import KernelRate
from rlexp.config.load import compose_config
from rlexp.training.train.header import installable


def of(
    kernel: str, generation: int, tokens: int, forward: float, *, size: int = 128, peak: float = 1000.0
) -> KernelRate:
    return KernelRate(kernel, generation, size, tokens, forward, forward, peak, "a card", "2026-01")


def speeds(*known: KernelRate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rows", lambda: known)
    rates.measured.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    rates.measured.cache_clear()


def test_the_table_is_of_kernels_that_run_there() -> None:
    for row in rates.rows():
        assert row.kernel in able(row.generation, row.head_size)
        assert 0 < row.backward <= row.peak
        assert 0 < row.forward <= row.peak
        assert row.card
        assert row.date
    assert {NEEDS[name].heads.keys() >= {generation} for name, generation in rates.SAID} == {True}


def test_between_lengths_the_rate_changes_evenly_with_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(of("torch_flash", 9, 1024, 200), of("torch_flash", 9, 4096, 400), monkeypatch=monkeypatch)
    found = {tokens: rates.measured("torch_flash", 9, 128, tokens) for tokens in (1, 1024, 2048, 4096, 1 << 20)}
    assert {tokens: each and round(each.forward, 6) for tokens, each in found.items()} == {
        1: 0.2, 1024: 0.2, 2048: 0.3, 4096: 0.4, 1 << 20: 0.4,
    }  # fmt: skip
    for size, known in ((64, False), (96, True), (184, True), (200, False), (None, True)):
        assert (rates.measured("torch_flash", 9, size, 1024) is not None) == known, "a size too far from the measured"
    assert rates.measured("torch_flash", 10, 128, 1024) is None


def test_kernels_are_compared_at_lengths_that_all_were_measured_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short call is slow in any kernel: one that was measured at longer lengths only is not better for it."""
    known = [of("torch_flash", 9, 1024, 100), of("torch_flash", 9, 8192, 500), of("flash_attn_4", 9, 8192, 400)]
    speeds(*known, monkeypatch=monkeypatch)
    for tokens in (16, 1024, 8192, 1 << 20):
        assert rates.ranked(["flash_attn_4", "torch_flash"], 9, 128, tokens) == ["torch_flash", "flash_attn_4"]


def test_both_passes_count_by_their_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel is faster forward by more than the other is backward; but the backward pass takes longer."""
    one, other = of("torch_flash", 9, 1024, 500), of("flash_attn_4", 9, 1024, 400)
    speeds(one, KernelRate(**vars(other) | {"forward": 1000.0}), monkeypatch=monkeypatch)
    assert rates.ranked(["flash_attn_4", "torch_flash"], 9, 128, 1024) == ["torch_flash", "flash_attn_4"]


def test_what_is_only_said_compares_but_tells_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds(of("torch_flash", 9, 1024, 300), monkeypatch=monkeypatch)
    third = rates.speed("flash_attn_3", 9, 128, 1024)
    assert third is not None
    assert (third.forward, third.backward, third.absolute) == (0.3 * 1.75, 0.3 * 1.6, False)
    fourth = rates.speed("flash_attn_4", 10, 128, 1024)
    assert fourth is not None
    assert not fourth.absolute, "2.7 times a rate that nobody has measured"
    assert rates.speed("flash_attn_4", 12, 128, 1024) is None


@pytest.mark.parametrize(
    ("kernel", "generation", "size", "there", "said"),
    [
        ("torch_flash", 9, 128, (), "2.1 times as fast (measured on h200, 2026-11); pip install"),
        ("flash_attn_3", 9, 128, (), "1.3 times as fast (measured on h200, 2026-11); pip install"),
        (
            "torch_flash",
            10,
            128,
            (),
            "2.7 times as fast (its authors: up to 2.7 times Triton's kernel on a B200, arXiv",
        ),
        ("torch_flash", 9, 128, ("flash_attn_4",), None),  # it was not wanted
        ("flash_attn_4", 9, 128, ("flash_attn_4",), None),
        ("torch_flash", 9, 256, (), None),  # nobody knows
        ("torch_flash", 8, 128, (), None),  # it does not run there
        ("plain", 9, 128, (), None),
        ("cpu_flash", None, 128, (), None),
    ],
)
def test_a_run_names_a_faster_kernel_that_could_be_installed(
    monkeypatch: pytest.MonkeyPatch, kernel: str, generation: int | None, size: int, there: tuple[str, ...],
    said: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(rates, "installed", ("torch_flash", *there).__contains__)
    config = SimpleNamespace(to_dict=lambda: {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": size})
    run: Any = SimpleNamespace(
        kernel=SimpleNamespace(name=kernel, generation=generation),
        engine=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(config=config))),
        cfg=compose_config(["launch.device=cpu", "data.max_length=8192"]),
    )
    line = installable(run)
    assert bool(line) == (said is not None)
    if said is not None:
        assert line.startswith(f"kernel {kernel}: flash_attn_4 would compute attention {said}")
        assert line.endswith(f"; pip install '{FLASH_ATTN_4}'")


def test_measured_rows_replace_those_of_the_same_kernel_and_gpus(tmp_path: Path) -> None:
    table = tmp_path / "rates.csv"
    rates.write([], table)
    assert table.read_bytes() == rates.TABLE.read_bytes(), "the table is as it is written"
    rates.write([of("torch_flash", 9, 4096, 250.5), of("torch_flash", 8, 4096, 150)], table)
    lines = table.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("torch_flash")] == [
        "torch_flash,8,128,4096,150,150,1000,a card,2026-01",
        "torch_flash,9,128,4096,250.5,250.5,1000,a card,2026-01",
    ]
    assert sum(line.startswith("flash_attn_4,9") for line in lines) == 4
