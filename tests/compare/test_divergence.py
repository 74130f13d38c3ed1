"""Which curves agree: what rounding may do, the noise floor, and what is another experiment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.compare import comparison as reports
from rlexp.compare.comparison import telling
from rlexp.config.identity import curve_keys, depends_on_length, of_length
from rlexp.config.load import compose_config
from rlexp.run_files.curve_distance import difference
from rlexp.run_files.metrics_jsonl import columns_of, read_columns
from tests.helpers.curves import a_job, a_run, compare, nudged, report_of

pytestmark = pytest.mark.usefixtures("unpainted")


def test_in_float64_every_metric_is_held(tmp_path: Path) -> None:
    fp64 = ("train.precision=fp64",)
    a_run(tmp_path / "runs" / "a", *fp64)
    a_run(tmp_path / "runs" / "b", *fp64, "parallel=ring2", noise=1e-14)
    assert report_of(tmp_path / "runs").outcome.status == "agree"
    a_run(tmp_path / "runs" / "c", *fp64, "parallel=ring4", edit=nudged(5, 1e-8, "train/rewards/margins"))
    verdict = report_of(tmp_path / "runs").outcome
    assert verdict.status == "apart"
    assert "c diverges from a at step 5: train/rewards/margins" in verdict.headline


def test_the_noise_floor_is_measured_where_it_can_be(tmp_path: Path) -> None:
    """A run of the same layout with another micro-batch measures it. Without one it is called an estimate."""
    a_run(tmp_path / "runs" / "a")
    a_run(tmp_path / "runs" / "b", "parallel=ring2", noise=1.2e-5)
    assert report_of(tmp_path / "runs").outcome.status == "apart"
    floor = next(m for m in reports.payload_of(report_of(tmp_path / "runs")).metrics if m.name == "train/loss")
    assert floor.floor_kind.startswith("estimated")
    a_run(tmp_path / "runs" / "noise", "train.micro_batch_size=2", noise=2e-6)
    report = report_of(tmp_path / "runs")
    assert report.outcome.status == "agree"  # no further apart than two runs of one layout
    floor = next(m for m in reports.payload_of(report).metrics if m.name == "train/loss")
    assert floor.floor_kind == "measured: noise"
    assert (np.diff(floor.floor) >= 0).all()


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_defect_of_the_micro_batch_is_no_noise(tmp_path: Path, precision: str) -> None:
    """The noise floor is not compared with itself, and excuses no other run."""
    said = f"train.precision={precision}"
    a_run(tmp_path / "runs" / "a", said)
    a_run(tmp_path / "runs" / "b", said, "train.micro_batch_size=2", edit=nudged(7, 0.05))
    a_run(tmp_path / "runs" / "c", said, "parallel=ring4", edit=nudged(9, 0.3))
    status = {each.run.label: each.status for each in report_of(tmp_path / "runs").outcome.agreements}
    assert status == {"b": "apart", "c": "apart"}


@pytest.mark.parametrize(
    "other", ["parallel=ring2", "engine=torch", "train.precision=bf16", "launch.nproc=2"], ids=lambda other: other
)
def test_noise_is_of_the_same_layout_engine_and_precision(tmp_path: Path, other: str) -> None:
    a_run(tmp_path / "runs" / "a")
    a_run(tmp_path / "runs" / "b", other, "train.micro_batch_size=2", noise=2e-7)
    floor = next(m for m in reports.payload_of(report_of(tmp_path / "runs")).metrics if m.name == "train/loss")
    assert floor.floor_kind.startswith("estimated")


def test_other_packing_is_noise(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a")
    a_run(tmp_path / "runs" / "b", "data.packing=false", noise=2e-7)
    floor = next(m for m in reports.payload_of(report_of(tmp_path / "runs")).metrics if m.name == "train/loss")
    assert floor.floor_kind == "measured: b"


@pytest.mark.parametrize(
    ("precision", "by", "status"),
    [
        *(("fp32", 1e-6, "agree"), ("fp32", 8e-6, "apart")),
        *(("bf16", 1e-3, "agree"), ("bf16", 5e-2, "apart")),
        *(("fp64", 2e-13, "agree"), ("fp64", 3e-12, "apart")),
    ],
)
def test_what_rounding_may_do_depends_on_the_precision(tmp_path: Path, precision: str, by: float, status: str) -> None:
    a_run(tmp_path / "runs" / "a", f"train.precision={precision}")
    a_run(tmp_path / "runs" / "b", f"train.precision={precision}", "parallel=ring2", edit=nudged(4, by))
    assert report_of(tmp_path / "runs").outcome.status == status


def test_of_two_precisions_the_coarser_counts(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a", "train.precision=fp64")
    a_run(tmp_path / "runs" / "b", "train.precision=fp32", noise=3e-7)
    assert report_of(tmp_path / "runs").outcome.status == "agree"


@pytest.mark.parametrize(("step", "status"), [(90, "apart"), (110, "unproven")])
def test_a_defect_is_surely_one_within_a_hundred_steps(tmp_path: Path, step: int, status: str) -> None:
    a_run(tmp_path / "runs" / "a", steps=130)
    a_run(tmp_path / "runs" / "b", "parallel=ring2", steps=130, edit=nudged(step, 1e-3))
    assert report_of(tmp_path / "runs").outcome.status == status


def test_what_only_grows_late_is_not_called_a_defect(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a", steps=300)
    a_run(tmp_path / "runs" / "b", "parallel=ring2", steps=300, edit=nudged(250, 1e-3))
    verdict = report_of(tmp_path / "runs").outcome
    assert verdict.status == "unproven"
    assert "train.micro_batch_size" in verdict.details[0]


def test_another_experiment_is_compared_by_force_only(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(two / "other", "seed=1", "optim.lr=1e-3")
    assert compare(two, "--baseline", "one") == 1
    said = capsys.readouterr().err
    assert said.startswith("rlexp: other: is not the same experiment as one: optim.lr is 0.001 here and 0.0005 there.")
    assert "--force" in said
    assert compare(two, "--baseline", "one", "--force") == 0
    said = capsys.readouterr().out
    assert "! compared by force: other: seed is 1 here and 0 there" in said
    assert "other: seed is 1 here and 0 there" in (two / "report.html").read_text(encoding="utf-8")


def test_a_sweep_over_seeds_has_a_baseline_for_each(tmp_path: Path) -> None:
    jobs = []
    for number, (seed, ring) in enumerate([(0, 1), (0, 2), (1, 1), (1, 2)]):
        a_run(tmp_path / "sw" / str(number), f"seed={seed}", f"parallel=ring{ring}",
              edit=nudged(1, seed / 10), noise=1e-7)  # fmt: skip
        axes = {"seed": str(seed), "parallel": f"ring{ring}"}
        jobs.append(a_job(number, str(number), axes, baseline=number // 2 * 2))
    (tmp_path / "sw" / "sweep.json").write_text(
        json.dumps({"name": "sw", "axes": ["seed", "parallel"], "jobs": jobs}), encoding="utf-8"
    )
    report = report_of(tmp_path / "sw")
    assert [family.baseline.name for family in report.families.families] == ["sw/0", "sw/2"]
    assert report.outcome.status == "agree"
    assert "draw 2 curves" in report.outcome.headline


def test_the_learning_rates_last_step_is_part_of_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "runs" / "a", "train.max_steps=20", steps=20, total_steps=20)
    a_run(tmp_path / "runs" / "b", "train.max_steps=10", steps=10, total_steps=10)
    assert compare(tmp_path / "runs") == 1
    assert "steps until which the learning rate falls is 10 here and 20 there" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "counted"), [
    (("optim.decay=constant",), set()), (("optim.decay=inverse_sqrt", "optim.warmup_steps=2"), set()),
    (("optim.decay=cosine",), {"steps until which the learning rate falls"}),
    (("optim.decay=constant", "optim.warmup_ratio=0.5"), {"steps of the warm-up"}),
    (("optim.decay=linear", "optim.warmup_ratio=0.5"),
     {"steps until which the learning rate falls", "steps of the warm-up"}),
])  # fmt: skip
def test_what_of_its_length_a_curve_depends_on(words: tuple[str, ...], counted: set[str]) -> None:
    keys = curve_keys(compose_config(["launch.device=cpu", *words]))
    assert of_length(keys, 20, 10).keys() == counted
    assert depends_on_length(keys) is bool(counted)
    assert of_length(keys, None, None) == {}  # of a run that wrote none


def test_a_run_without_run_json_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a_run(tmp_path / "runs" / "a") / "run.json").unlink()
    a_run(tmp_path / "runs" / "b", "seed=1")
    a_run(tmp_path / "runs" / "c", "seed=2")
    assert compare(tmp_path / "runs") == 1
    assert "c: is not the same experiment as b: seed is 2 here and 1 there" in capsys.readouterr().err


# ---- arithmetic ----


def test_a_metric_that_changes_its_sign_is_held_against_its_size() -> None:
    steps = np.arange(1, 5)
    one, other = np.array([1.0, -1.0, 1e-9, 1.0]), np.array([1.0, -1.0, -1e-9, 1.0])
    assert difference(steps, one, steps, other).relative.max() < 1e-8
    assert difference(steps, one + 2, steps, other + 2).relative.max() == pytest.approx(1e-9, rel=1e-3)


def test_nothing_is_apart_from_itself_and_gaps_are_left_out() -> None:
    steps = np.arange(1, 6)
    values = np.array([0.0, np.nan, 3.0, -2.0, 5.0])
    gap = difference(steps, values, np.array([1, 2, 4, 9]), np.array([0.0, 1.0, -2.0, 7.0]))
    assert gap.steps.tolist() == [1, 4]
    assert gap.relative.tolist() == [0.0, 0.0]
    assert difference(steps, 0.0 * steps, steps, 0.0 * steps).relative.tolist() == [0.0] * 5


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20000), st.integers(0, 10**6))
def test_what_is_drawn_holds_every_extreme(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values, gaps = random.standard_normal(count), 1e-9 * random.random(count)
    spike, apart = random.integers(count, size=2)
    values[spike], gaps[apart] = 100.0, 5e-8
    kept = telling(np.arange(count), [values], [gaps])
    assert {0, count - 1, int(spike), int(apart)} <= set(kept.tolist())
    assert len(kept) <= max(1000, 1003)
    assert len(set(kept.tolist())) == len(kept)


def test_a_text_is_no_number_and_no_rows_have_no_steps() -> None:
    loss = columns_of([{"step": 1, "train/loss": "12"}, {"step": 2, "train/loss": 3}])[1]["train/loss"]
    assert loss.tolist() == pytest.approx([np.nan, 3], nan_ok=True)
    assert columns_of([])[0].dtype == np.int64


def test_a_step_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """An older process may leave such a row; the last row counts."""
    lines = [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 2.0}, {"step": 2, "train/loss": 3.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    steps, columns = read_columns(path, [])
    assert steps.tolist() == [1, 2]
    assert columns["train/loss"].tolist() == [1.0, 3.0]
