"""The rates by which a step's time is estimated, and how the host's time and the device's come together."""

from __future__ import annotations

import json

import pytest

from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.load import compose_config
from rlexp.config.paths import conf_dir
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal.log import Counts, Log, Pass
from rlexp.preflight.rehearsal.rates import ATTENTION, MEASURED, MEMORY, OF_SHEET, PRODUCTS, DeviceClock, Rates

FAST = Rates(products=1e12, attention=1e12, memory=1e12, link=1e9, launch=1e-5)


def of(*words: str) -> Rates:
    return Rates.of(compose_elsewhere([*words, "launch.nproc=1", "logger=none"]), 1)


def test_measured_rates_come_before_shares_of_the_data_sheet() -> None:
    measured, assumed = of("hardware=h200"), of("hardware=h100")
    assert (measured.products, measured.memory, measured.launch) == (820e12, 3.54e12, pytest.approx(10.5e-6))
    assert assumed.products == pytest.approx(989e12 * PRODUCTS)
    assert assumed.attention == pytest.approx(989e12 * ATTENTION)
    assert assumed.memory == pytest.approx(3.35e12 * MEMORY)
    assert assumed.launch == pytest.approx(4e-6)


def test_what_the_user_sets_comes_before_what_was_measured() -> None:
    own = of("hardware=h200", "hardware.memory_tb_s=2", "hardware.launch_us=1")
    assert (own.products, own.memory, own.launch) == (820e12, 2e12 * MEMORY, pytest.approx(1e-6))
    exact = of("hardware=h200", "train.precision=fp32")
    assert exact.products == pytest.approx(67e12 * PRODUCTS), "bf16 alone was measured"


def test_every_measured_hardware_is_described_and_dated() -> None:
    for option, found in json.loads(MEASURED.read_text("utf-8")).items():
        assert (conf_dir() / "hardware" / f"{option}.yaml").is_file()
        assert set(found) == {*OF_SHEET, "card", "date"}, option


def test_launches_run_ahead_of_the_device() -> None:
    """A hundred small kernels behind a large one are launched while it runs; alone, they take as long as the host."""
    log = Log("cuda", clock=DeviceClock(FAST))
    log.computed(10**10, 0)  # 10 ms
    for _ in range(100):
        log.computed(10**3, 0)  # 1 ns each, and 10 µs of the host
    assert log.counts.took == pytest.approx(10e-3, rel=1e-3)
    alone = Log("cuda", clock=DeviceClock(FAST))
    for _ in range(100):
        alone.computed(10**3, 0)
    assert alone.counts.took == pytest.approx(1e-3)


def test_on_a_cpu_an_operator_takes_at_least_its_call() -> None:
    cfg = compose_config(["launch.device=cpu", "logger=none"])
    log = Log("cpu", clock=DeviceClock(Rates.of(cfg, 1)))
    log.computed(10**3, 0)
    log.computed(10**9, 0)
    assert (log.counts.took, log.counts.launching) == (pytest.approx(1e-5 + 0.02), 0.0)


def test_the_host_waits_between_the_parts_of_a_step() -> None:
    """What the host loses in the optimizer, the device does not make good in the forward pass."""
    nothing: dict[str, int] = dict.fromkeys(("weights",), 0)

    def passed(phase: str, seconds: float, launching: float) -> Pass:
        return Pass(phase, nothing, nothing, Counts(seconds=seconds, launching=launching))

    step = [passed("build", 9, 9), passed("", 0, 1), passed("forward", 4, 1), passed("backward", 1, 2),
            passed("optimizer", 1, 3)]  # fmt: skip
    assert Prediction(step, 1, 1).seconds == 5 + 3
    drawing = [passed("rollout", 1, 5), passed("score", 2, 1), *step]
    assert Prediction(drawing, 1, 1).seconds == 5 + 2 + 5 + 3
