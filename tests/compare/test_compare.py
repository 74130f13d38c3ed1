"""Comparing runs: which curves agree, which do not, and what the comparison says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.compare import comparison as reports
from rlexp.compare.comparison import telling
from rlexp.compare.families import sort_out
from rlexp.compare.page import Peak
from rlexp.compare.runs import Reader, merge
from rlexp.curves.difference import difference
from rlexp.curves.metrics_jsonl import read_columns
from tests.helpers.curves import a_run, compare, report_of, rows


def nudged(step: int, by: float, name: str = "train/loss"):
    def edit(row: dict) -> None:
        if row["step"] >= step and name in row:
            row[name] += by

    return edit


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Runs with rings of one and four ranks, as far apart as float32 rounds."""
    a_run(tmp_path / "runs" / "one")
    a_run(tmp_path / "runs" / "four", "parallel=ring4", noise=2e-7)
    return tmp_path / "runs"


def test_one_curve_is_said_to_be_one(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, "--baseline", "one") == 0
    said = capsys.readouterr().out
    assert "The 2 runs draw one curve" in said
    assert f"{two}/report.html" in said
    assert "run " in said
    assert "baseline" in said
    assert {path.name for path in two.iterdir()} == {"one", "four", "report.html", "curves.png", "summary.json"}
    summary = json.loads((two / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["status"] == "agree"
    by_label = {run["label"]: run for run in summary["runs"]}
    assert by_label["one"]["baseline"] is True
    assert 0 < by_label["four"]["worst_difference"] < 5e-7
    # 1 rank at 0.1 s a step against 4 ranks at 0.4 s: a sixteenth of the tokens per second and rank.
    assert by_label["four"]["efficiency"] == pytest.approx(1 / 16)
    assert (two / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_defect_that_no_eye_sees_is_found(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(two / "wrong", "parallel=ring2", edit=nudged(7, 1e-5))
    assert compare(two, "--baseline", "one", "--fail-above", "1e-6") == 1
    said = capsys.readouterr().out
    assert "The curves diverge. wrong diverges from one at step 7: train/loss is " in said
    failed = next(line for line in said.splitlines() if line.startswith("FAILED: "))
    assert failed.startswith("FAILED: step 7: train/loss is ")
    assert " in wrong (wrong) and " in failed
    assert " in one (one), " in failed
    assert compare(two, "--baseline", "one", "--fail-above", "1e-4") == 0
    assert compare(two / "one", two / "four", "--out", two / "out", "--fail-above", "1e-6") == 0


def test_other_metrics_are_held_where_asked(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(two / "wrong", edit=nudged(3, 1e-3, "train/rewards/margins"))
    assert compare(two, "--baseline", "one", "--fail-above", "1e-6") == 0
    assert compare(two, "--baseline", "one", "--fail-above", "1e-6", "--metrics", "train/*") == 1
    assert "step 3: train/rewards/margins" in capsys.readouterr().out


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


def a_job(number: int, folder: str, axes: dict[str, str], *, baseline: int = 0, **facts: str) -> dict:
    known = {"number": number, "folder": folder, "overrides": [], "axes": axes, "baseline": baseline}
    return known | {"status": "finished", "reason": None} | facts


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


def test_a_run_without_run_json_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a_run(tmp_path / "runs" / "a") / "run.json").unlink()
    a_run(tmp_path / "runs" / "b", "seed=1")
    a_run(tmp_path / "runs" / "c", "seed=2")
    assert compare(tmp_path / "runs") == 1
    assert "c: is not the same experiment as b: seed is 2 here and 1 there" in capsys.readouterr().err


# ---- what --fail-above does not pass ----


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert compare(*arguments, "--fail-above", "1e-6") == 1
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED: "))


def test_a_run_without_a_step_is_no_pass(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(two / "dead", "parallel=ring2", steps=0, status="failed", reason="rank 1 failed")
    assert failed(capsys, two) == "FAILED: dead (dead) has no step: it is failed, rank 1 failed"


def test_steps_that_are_missing_are_no_pass(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = two / "four" / "metrics.jsonl"
    lines = curve.read_text(encoding="utf-8").splitlines(keepends=True)
    curve.write_text("".join([*lines[:5], *lines[8:]]), encoding="utf-8")
    said = failed(capsys, two, "--baseline", "one")
    assert said.startswith("FAILED: step 6: four (four) has no train/loss, while others do: 3 of 20 steps")
    assert (
        "Shorter or longer than its baseline: four."
        in json.loads((two / "summary.json").read_text(encoding="utf-8"))["verdict"]["headline"]
    )


def test_a_value_that_is_null_is_no_pass(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget(row: dict) -> None:
        if row["step"] == 3:
            row["train/loss"] = None

    a_run(two / "wrong", "parallel=ring2", edit=forget)
    assert "FAILED: step 3: wrong (wrong) has no train/loss" in failed(capsys, two)


def test_any_two_runs_are_held_not_each_and_the_baseline_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "runs" / "a")
    a_run(
        tmp_path / "runs" / "b",
        "parallel=ring2",
        edit=lambda row: row.update({"train/loss": row["train/loss"] * (1 + 9e-7)}),
    )
    a_run(
        tmp_path / "runs" / "c",
        "parallel=ring4",
        edit=lambda row: row.update({"train/loss": row["train/loss"] * (1 - 9e-7)}),
    )
    said = failed(capsys, tmp_path / "runs")
    assert "step 1: train/loss is " in said
    assert " in b (b) and " in said
    assert " in c (c), 1.8e-06 apart" in said


def test_a_metric_that_is_not_there_is_a_mistake(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, "--fail-above", "1e-6", "--metrics", "train/loss", "eval/los") == 1
    assert capsys.readouterr().err.startswith("rlexp: --metrics eval/los: fits no metric")
    assert compare(two, "--fail-above", "1e-6", "--metrics", "memory/*") == 1  # a metric of the layout itself


# ---- wrong input: one message, and what is there is shown ----


def test_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    assert compare(tmp_path / "empty") == 1
    assert capsys.readouterr().err.startswith(f"rlexp: {tmp_path}/empty: holds no run: ")
    assert compare(tmp_path / "absent") == 1
    assert capsys.readouterr().err.startswith(f"rlexp: {tmp_path}/absent: no such folder.")
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert compare("runs/absent") == 1  # which might be a W&B project
    said = capsys.readouterr().err
    assert said.startswith("rlexp: runs/absent: no such folder in ")
    assert "As a W&B project: " in said


def test_a_torn_last_line_and_a_broken_one(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = two / "four" / "metrics.jsonl"
    lines = curve.read_text(encoding="utf-8").splitlines(keepends=True)
    curve.write_text("".join([*lines[:4], "{broken\n", *lines[5:], '{"step": 21, "train/l']), encoding="utf-8")
    assert compare(two, "--baseline", "one") == 0
    said = capsys.readouterr().out
    assert f"{curve}: its last line is torn, and left out" in " ".join(said.split())
    assert f"{curve}:5: is not JSON, and left out" in " ".join(said.split())
    assert "draw one curve" in said


def test_runs_without_a_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "a", steps=3)

    def later(row: dict) -> None:
        row["step"] += 100

    a_run(tmp_path / "runs" / "b", "parallel=ring2", steps=3, edit=later)
    assert compare(tmp_path / "runs") == 0
    assert "b has no step in common with a" in (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert compare(tmp_path / "runs", "--fail-above", "1e-6") == 1
    assert "FAILED: step 1: b (b) has no train/loss, while others do: 3 of 6 steps" in capsys.readouterr().out


def test_a_baseline_that_is_not_there(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, "--baseline", "three") == 1
    said = capsys.readouterr().err
    assert said.startswith("rlexp: --baseline three: names no run. The runs are ")
    for name in ("one", "four"):
        assert f"{name} ({name})" in said


def test_a_sweep_whose_baseline_failed(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        a_job(0, "gone", {"parallel": "ring8"}, status="failed", reason="rank 3 failed"),
        *(a_job(number, name, {"parallel": name}) for number, name in enumerate(("one", "four"), 1)),
    ]
    (two / "sweep.json").write_text(json.dumps({"name": "sw", "axes": ["parallel"], "jobs": jobs}), encoding="utf-8")
    assert compare(two) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the baseline ring8 has no curve (failed: rank 3 failed); one is the baseline instead" in said
    assert "ring8 is failed: rank 3 failed" in said
    assert "The 2 runs draw one curve" in said


def test_half_written_files_and_odd_names_do_not_end_it(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two / "one" / "config.yaml").write_text("train:\n  batch_size: 8\n loss: [", encoding="utf-8")
    (two / "one" / "run.json").write_text("[]", encoding="utf-8")
    (two / "one" / "memory.jsonl").write_text("[1]\n", encoding="utf-8")
    a_run(two / "a$x^$ \u00e9", "parallel=ring2")
    os.rename(two / "four", os.fsencode(two) + b"/\xff\xfe")

    def no_loss(row: dict) -> None:
        del row["train/loss"]

    a_run(two / "other", "parallel=ring8", edit=no_loss)
    assert compare(two) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{two}/one/config.yaml: cannot be read, so the run's settings are not known" in said
    assert f"{two}/one: has no run.json" in said
    json.loads((two / "summary.json").read_text(encoding="utf-8"))


def test_a_ledger_that_is_none(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{broken", '{"jobs": [{"odd": 1}]}', '{"jobs": [3]}'):
        (two / "sweep.json").write_text(text, encoding="utf-8")
        assert compare(two) == 1
        assert capsys.readouterr().err.startswith(f"rlexp: {two}/sweep.json: is not a sweep's ledger")


def test_sweeps_of_one_name_keep_their_own_baselines(tmp_path: Path) -> None:
    for parent in ("p", "q"):
        for number, ring in enumerate((1, 2)):
            a_run(tmp_path / parent / "sw" / str(number), f"parallel=ring{ring}", noise=1e-7 * number)
        jobs = [a_job(number, str(number), {"parallel": f"ring{ring}"}) for number, ring in enumerate((1, 2))]
        (tmp_path / parent / "sw" / "sweep.json").write_text(
            json.dumps({"name": "sw", "axes": ["parallel"], "jobs": jobs}), encoding="utf-8"
        )
    group = merge([g for parent in "pq" if (g := Reader().group(tmp_path / parent / "sw"))])
    assert len({run.name for run in group.runs}) == len({run.label for run in group.runs}) == 4
    families = sort_out(group, baseline=None, force=False)
    assert not families.notes
    assert families.families[0].baseline.path == tmp_path / "p" / "sw" / "0"
    again = merge([g for _ in range(2) if (g := Reader().group(tmp_path / "p" / "sw"))])
    assert len(again.runs) == 2


def test_no_run_has_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "a", steps=0)
    assert compare(tmp_path / "runs") == 1
    assert "no run has a step yet" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--fail-above", "-1"), ("--fail-above", "nan"), ("--watch", "0")])
def test_thresholds_that_make_no_sense(two: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, *option) == 1
    assert capsys.readouterr().err.startswith(f"rlexp: {option[0]} ")


def test_a_run_whose_process_is_gone_is_not_called_running(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    a_run(tmp_path / "runs" / "a", status="running", pid=dead.pid)
    a_run(tmp_path / "runs" / "b", status="running", pid=os.getpid())
    runs = {run.name: run for run in report_of(tmp_path / "runs").group.runs}
    assert (runs["a"].status, runs["b"].status) == ("stopped", "running")


def test_a_sweep_that_was_stopped_has_nothing_waiting(tmp_path: Path) -> None:
    """Otherwise `--watch` would wait for ever."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    a_run(tmp_path / "sw" / "0")
    jobs = [a_job(0, "0", {"parallel": "ring1"}), a_job(1, "1", {"parallel": "ring2"}, status="waiting")]
    for pid, status in ((dead.pid, "stopped"), (os.getpid(), "waiting")):
        ledger = {"name": "sw", "axes": ["parallel"], "jobs": jobs, "host": socket.gethostname(), "pid": pid}
        (tmp_path / "sw" / "sweep.json").write_text(json.dumps(ledger), encoding="utf-8")
        group = Reader().group(tmp_path / "sw")
        assert [run.status for run in group.runs] == ["finished", status]


def test_a_reader_sees_that_a_run_was_killed(tmp_path: Path) -> None:
    """A killed run's files stay as they were."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    a_run(tmp_path / "a", status="running", pid=process.pid)
    reader = Reader()
    assert reader.group(tmp_path / "a").runs[0].status == "running"
    process.kill()
    process.communicate(timeout=30)
    assert reader.group(tmp_path / "a").runs[0].status == "stopped"


# ---- what a run cost ----


def test_speed_and_time_leave_out_the_first_step(tmp_path: Path) -> None:
    def slow_start(row: dict) -> None:
        row["train/step_seconds"] = {1: 60.0, 2: 0.1, 3: 0.1, 4: 0.4}[row["step"]]

    a_run(tmp_path / "runs" / "a", steps=4, edit=slow_start)
    card = reports.payload_of(report_of(tmp_path / "runs")).runs[0]
    assert card.step_seconds == pytest.approx(0.1)  # the median
    assert card.tokens_per_second == pytest.approx((1002 + 1003 + 1004) / 0.6)
    assert card.last_loss == pytest.approx(rows(4)[-1]["train/loss"])
    assert card.clock.seconds.tolist() == pytest.approx([60.0, 60.1, 60.2, 60.6])
    assert card.clock.tokens.tolist() == [1001, 2003, 3006, 4010]


def test_the_peak_is_of_one_row(tmp_path: Path) -> None:
    """Phase and rank are those of the step with the peak, even if an earlier process took that step."""

    def peaks(row: dict) -> None:
        forward, backward = (9e9, 8e9) if row["step"] == 2 else (1e9, 2e9)
        row |= {"memory/forward_peak_bytes": forward, "memory/backward_peak_bytes": backward}
        row |= {"memory/peak_bytes": max(forward, backward), "memory/peak_rank": 1 if row["step"] == 2 else 0}

    a_run(tmp_path / "runs" / "a", steps=4, edit=peaks)
    card = reports.payload_of(report_of(tmp_path / "runs")).runs[0]
    assert (card.peak_bytes, card.peak_phase, card.peak_rank) == (9_000_000_000, "forward", 1)


def test_live_tensors_come_before_the_resident_peak_where_they_were_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def counted(row: dict) -> None:
        row |= {"memory/peak_bytes": int(3.8e8), "memory/peak_rank": 0, "memory/forward_peak_bytes": int(3.8e8)}
        if row["step"] == 3:  # not every step is counted
            row |= {"memory/forward_tensors_peak_bytes": 4e6, "memory/backward_tensors_peak_bytes": 5.25e6}
            row |= {"memory/tensors_peak_bytes": 5.25e6, "memory/tensors_peak_rank": 1}

    a_run(tmp_path / "runs" / "a", steps=4, edit=counted)
    a_run(tmp_path / "runs" / "b", steps=4)
    report = report_of(tmp_path / "runs")
    cards = {card.name: card for card in reports.payload_of(report).runs}
    assert cards["a"].tensors == Peak(5_250_000, 1, "backward")
    assert (cards["a"].peak_bytes, cards["a"].peak_phase) == (380_000_000, "forward")
    assert cards["b"].tensors is None
    assert compare(tmp_path / "runs") == 0
    head, _, *lines = capsys.readouterr().out.strip().splitlines()
    assert re.search(r"peak tensors +peak resident$", head)
    assert re.search(r"5\.25 MB \(backward, r1\) +0\.38 GB$", lines[0])
    assert re.search(r"– +4 MB$", lines[1])
    first, second = json.loads((tmp_path / "runs" / "summary.json").read_text(encoding="utf-8"))["runs"]
    assert first["tensors"] == {"bytes": 5_250_000, "rank": 1, "phase": "backward"}
    assert second["tensors"] is None


def test_a_job_that_was_repaired_by_itself_is_finished(tmp_path: Path) -> None:
    a_run(tmp_path / "sw" / "0")
    a_run(tmp_path / "sw" / "1", "parallel=ring2", status="failed", reason="rank 1 failed")
    jobs = [a_job(n, str(n), {"parallel": f"ring{n + 1}"}, status="failed", reason="killed") for n in range(2)]
    (tmp_path / "sw" / "sweep.json").write_text(json.dumps({"jobs": jobs, "axes": ["parallel"]}), encoding="utf-8")
    assert [(run.status, run.reason) for run in Reader().group(tmp_path / "sw").runs] == [
        ("finished", "all steps are done"),
        ("failed", "killed"),
    ]


def test_what_must_not_differ_is_marked_and_summed_up(two: Path) -> None:
    report = report_of(two)
    rows_ = {row.key: row for row in reports.payload_of(report).config}
    assert rows_["optim.lr"].must_not
    assert rows_["train.batch_size"].must_not
    assert not rows_["train.micro_batch_size"].must_not
    assert rows_["parallel.ring_size"].differs
    assert not any(key.startswith("logger.baseline") for key in rows_)
    (family,) = reports.summary(report, reports.payload_of(report))["families"]
    (apart,) = family["largest_differences"].values()
    assert 0 < apart["train/loss"]["relative"] < 5e-7
    assert "memory/peak_bytes" not in apart


# ---- live ----


def test_watching_redraws_until_the_runs_have_ended(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "a")
    growing = a_run(runs / "b", "parallel=ring2", steps=10, status="running")
    command = [sys.executable, "-m", "rlexp.compare", str(runs), "--watch", "0.2"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        steps = wait_for(runs / "summary.json", lambda summary: summary["runs"][1]["steps"] == 10)
        page = (runs / "report.html").read_text(encoding="utf-8")
        assert '"watch":0.2' in page
        more = a_run(tmp_path / "more", "parallel=ring2", steps=14)
        (growing / "metrics.jsonl").write_bytes((more / "metrics.jsonl").read_bytes())
        steps = wait_for(runs / "summary.json", lambda summary: summary["runs"][1]["steps"] == 14)
        assert steps
        known = json.loads((growing / "run.json").read_text(encoding="utf-8"))
        (growing / "run.json").write_text(json.dumps(known | {"status": "finished"}), encoding="utf-8")
        assert watcher.wait(timeout=30) == 0
    finally:
        watcher.kill()
        watcher.communicate(timeout=10)
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert '"watch":null' in page


def wait_for(path: Path, true_of) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if true_of(json.loads(path.read_text(encoding="utf-8"))):
                return True
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"{path} never came to say so")


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


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20000), st.integers(0, 10**6))
def test_what_is_drawn_holds_every_extreme(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values, gaps = random.standard_normal(count), random.random(count)
    spike, apart = random.integers(count, size=2)
    values[spike], gaps[apart] = 100.0, 50.0
    kept = telling(np.arange(count), [values], [gaps])
    assert {0, count - 1, int(spike), int(apart)} <= set(kept.tolist())
    assert len(kept) <= max(1000, 1003)
    assert len(set(kept.tolist())) == len(kept)


def test_a_step_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """An older process may leave such a row; the last row counts."""
    lines = [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 2.0}, {"step": 2, "train/loss": 3.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    steps, columns = read_columns(path, [])
    assert steps.tolist() == [1, 2]
    assert columns["train/loss"].tolist() == [1.0, 3.0]


def test_comparing_imports_no_torch() -> None:
    code = "import sys, rlexp.compare.__main__, rlexp.compare.picture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
