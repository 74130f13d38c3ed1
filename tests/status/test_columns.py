"""Each column of `rlexp.status` has the number that a run's files tell, worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlexp.launch.rank_progress import Whereabouts
from rlexp.status import draw
from rlexp.status.__main__ import main
from rlexp.status.view import StatusView

Rank = tuple[dict[str, int], dict[str, int]]  # the peaks of its memory by phase, and those of its tensors


def written(run: Path, rows: Sequence[dict[str, Any]], ranks: Sequence[Rank], **known: Any) -> None:
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"host": "another machine", "pid": 1} | known), encoding="utf-8")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for rank, (peaks, tensors) in enumerate(ranks):
        Whereabouts(run, rank).tell(step=len(rows), phase="forward", peaks=peaks, tensors=tensors)


def row(step: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {"step": step, "train/loss": 1 / (step + 2), "train/tokens": tokens, "train/step_seconds": seconds}


def test_each_number_of_a_running_and_a_finished_run_is_what_its_files_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pace and speed are of the last 50 steps, and not of a run's first one. The running one has taken, on average,
    (11 + … + 60) / 50 · 0.2 = 7.1 s and 12,485 tokens for each of these; of it, 30 steps are left."""
    going = [row(step, 10_000 + 70 * step, 0.2 * step) if step > 10 else row(step, 1, 99.0) for step in range(1, 61)]
    going[57]["train/objective/scores"] = 0.45678
    written(tmp_path / "going", going, [
        ({"forward": 3_210_000_000, "backward": 2_000_000_000}, {"forward": 123_400_000, "optimizer": 5}),
        ({"data": 7, "optimizer": 4_567_000_000}, {"backward": 98_760_000}),
    ], status="running", steps=90, evaluated={"eval/loss": 0.61234, "eval/rewards/accuracies": 0.876})  # fmt: skip
    done = [row(1, 9, 50.0), *(row(step, 1_100_000 * step, 1.0 * step) for step in range(2, 6))]
    written(tmp_path / "done", done, [({"data": 4}, {"data": 34_560}), ({"data": 5}, {}), ({"eval": 87_640_000}, {})],
            status="finished", steps=5, evaluated={"eval/loss": 1.5, "eval/objective/scores": 0.12345})  # fmt: skip
    assert main([str(tmp_path)]) == 0
    lines = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert [lines[0], *lines[2:]] == [
        ["run", "status", "steps", "last loss", "last score", "held-out rows", "tokens/s", "peak tensors",
         "peak memory", "time left"],
        ["done", "finished", "5/5 (100%)", "0.142857", "–", "loss 1.5000", "score 0.123", "1,100,000",
         "0.0346 MB (data, r0)", "87.6 MB (eval, r2)", "–"],
        ["going", "running", "60/90 (67%)", "0.016129", "0.4568", "loss 0.6123", "acc 0.88", "1,758",
         "0.123 GB (forward, r0)", "4.57 GB (optimizer, r1)", "3 min 33 s"],
    ]  # fmt: skip
    assert main([str(tmp_path), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    numbers = ("step", "steps", "last_loss", "last_score", "tokens_per_second", "step_seconds", "seconds_left",
               "peak_bytes", "peak_rank", "tensors_peak_bytes", "tensors_peak_rank")  # fmt: skip
    finished, running = ([job[name] for name in numbers] for job in jobs)
    assert finished == [5, 5, 1 / 7, None, 1.1e6, 3.5, None, 87_640_000, 2, 34_560, 0]
    assert running == [60, 90, 1 / 62, 0.45678, *map(pytest.approx, (12_485 / 7.1, 7.1, 213.0)), 4_567_000_000, 1,
                       123_400_000, 0]  # fmt: skip
    look, gone = StatusView(tmp_path).look(), list[str]()
    names = [each.name for each in draw.columns(look, bars=False)]
    for width in range(200, 30, -1):  # of a terminal
        kept = draw.fitting(draw.columns(look, bars=False), look.rows, width)
        gone += [name for name in names if name not in {*gone, *(each.name for each in kept)}]
        cells = [[each.name, *map(each.cell, look.rows)] for each in kept]
        assert len("  ".join(max(column, key=len) for column in cells)) <= max(width, 30), width
    assert gone == ["peak tensors", "peak memory", "tokens/s", "held-out rows", "last score", "last loss", "time left"]


def test_labels_are_cut_where_they_still_differ() -> None:
    for labels, cut in ((("one of many", "two of many"), ["one o…", "two o…"]),
                        (("many of one", "many of two"), ["…f one", "…f two"])):  # fmt: skip
        rows: list[Any] = [SimpleNamespace(label=each) for each in labels]
        assert draw.shortened(rows, 6) == cut


def test_a_job_that_failed_without_a_reason_is_named(tmp_path: Path) -> None:
    written(tmp_path / "r", [], [], status="failed")
    assert draw.text(StatusView(tmp_path / "r").look()).splitlines()[-1] == "r is failed"
