"""What --fail-above does not pass, and wrong input: one message, in which what is there is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.curves import a_run, compare, nudged

pytestmark = pytest.mark.usefixtures("unpainted")


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert compare(*arguments, "--fail-above", "1e-6") == 1
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED: "))


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


# ---- wrong input ----


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


def test_a_ledger_that_is_none(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{broken", '{"jobs": [{"odd": 1}]}', '{"jobs": [3]}'):
        (two / "sweep.json").write_text(text, encoding="utf-8")
        assert compare(two) == 1
        assert capsys.readouterr().err.startswith(f"rlexp: {two}/sweep.json: is not a sweep's ledger")


def test_no_run_has_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "a", steps=0)
    assert compare(tmp_path / "runs") == 1
    assert "no run has a step yet" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--fail-above", "-1"), ("--fail-above", "nan"), ("--watch", "0")])
def test_thresholds_that_make_no_sense(two: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, *option) == 1
    assert capsys.readouterr().err.startswith(f"rlexp: {option[0]} ")
