"""What preflight says while it rehearses, and of the time that a run takes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlexp.base.durations import duration
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.preflight import report
from rlexp.preflight.answer import rows_at_hand, steps_of_epoch
from rlexp.preflight.children import Calls, at_once
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan, rehearse

GPUS = ("hardware=h100", "launch.nproc=2", "parallel=ring2", "engine=zero2")


def test_a_line_every_five_seconds_says_what_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    cfg = compose_elsewhere([*GPUS, "data.max_length=4096"])
    call = (rehearse, (RehearsalPlan(cfg, None, 0, 3),))
    said = report.Progress(90.0)
    for seconds in range(100, 112):
        clock[0] = float(seconds)
        said([call, call], seconds - 100)
    assert capsys.readouterr().err.splitlines() == [
        f"rlexp preflight: rehearses zero2, a ring of 2, 4,096 tokens (3 layers); {done} done, {at} s so far"
        for at, done in ((10, 0), (15, 5), (20, 10))
    ]
    assert report.doing([(len, ("a text",))]) == "other rings"


def test_calls_are_watched_while_they_run() -> None:
    seen: list[tuple[int, int]] = []

    def task() -> Calls:
        return (yield [(time.sleep, (0.1,)), (abs, (-3,)), (abs, (-4,))])

    found = at_once([task()], 2, lambda running, done: seen.append((len(running), done)))
    assert found == [[None, 3, 4]]
    assert seen[0] == (2, 0)
    assert len(seen) > 1
    assert {running + done for running, done in seen} <= {2, 3}  # two at a time, of three


@pytest.mark.parametrize(
    ("seconds", "said", "whole"),
    [(0.0027, "2.7 ms", "0 s"), (0.34, "340 ms", "0 s"), (3.44, "3.4 s", "3 s"), (48.2, "48 s", "48 s"),
     (161, "2 min 41 s", "2 min 41 s"), (7620, "2 h 07 min", "2 h 07 min"), (9.96, "10 s", "10 s")],
)  # fmt: skip
def test_a_time_is_said_in_units_that_people_use(seconds: float, said: str, whole: str) -> None:
    assert duration(seconds, fine=True) == said
    assert duration(seconds) == whole


@pytest.mark.parametrize(
    ("words", "rows", "steps"),
    [
        (["data=jsonl", "data.path=rows.jsonl"], 40, 5),
        (["data=jsonl", "data.path=rows.jsonl", "data.eval_size=0.1"], 36, 4),
        (["data=jsonl", "data.path=rows.jsonl", "data.eval_size=3", "data.drop_last=false"], 37, 5),
        (["data=jsonl", "data.path=rows.jsonl", "data.max_samples=16"], 16, 2),
        (["data=hf", "data.path=NOBODY/NOTHING"], None, None),
        (["data=jsonl", "data.path=not_there.jsonl"], None, None),
        (["data.size=80"], 80, 10),
        (["loss=grpo", "data=arithmetic", "reward.rule=arithmetic", "data.size=64", "rollout.epochs=2"], 64, 64),
    ],
)
def test_the_rows_at_hand_are_counted(
    words: list[str], rows: int | None, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is a row; and an epoch of rollouts has its minibatches, so often."""
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    Path("rows.jsonl").write_text(f"{line}\n\n" * 40)
    cfg = compose_elsewhere([*GPUS, *words])
    assert rows_at_hand(cfg) == rows
    assert rows is None or steps_of_epoch(cfg, rows) == steps
