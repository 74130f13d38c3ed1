"""Runs under Slurm that are disturbed, and what they came to: which steps were really taken, and how often."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.curves import differences, excesses
from bench.resume import curve_of
from tests.runs import run_json, steps_of
from tests.slurm.jobs import FAULTY

TAKEN = "taken.jsonl"


def paced(seconds: float, folder: Path) -> dict[str, str]:
    """The environment of a command whose ranks are slow, and note each step that they have taken in the folder."""
    path = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "RLEXP_TEST_PACE": str(seconds), "RLEXP_TEST_TAKEN": str(folder / TAKEN)}


@dataclass(frozen=True)
class Taken:
    """A step that rank 0 of a job has computed."""

    job: str
    start: int
    step: int
    at: float
    pid: int


def taken(folder: Path, job: str | None = None) -> list[Taken]:
    path = folder / TAKEN
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [each for each in (Taken(**json.loads(line)) for line in lines) if job in (None, each.job)]


def again(steps: list[Taken]) -> int:
    """How many steps were taken a second time, or a third."""
    return sum(times - 1 for times in Counter(each.step for each in steps).values())


def starts(steps: list[Taken]) -> list[int]:
    return sorted({each.start for each in steps})


def waited(steps: list[Taken], since: float, start: int) -> float:
    """Seconds from the disturbance to the first step of a later start."""
    return min(each.at for each in steps if each.start >= start and each.at > since) - since


def wrong_about(undisturbed: Path, run_dir: Path) -> list[str]:
    """Of a run that was disturbed: each step once, the same curve and weights, and nothing said that is not so."""
    one, other = curve_of(undisturbed), curve_of(run_dir)
    expected = [row["step"] for row in one.rows]
    if steps_of(run_dir) != expected:
        return [f"its steps are {steps_of(run_dir)}"]
    found = [*excesses(one, other)]
    if one.rows[-1]["train/total_tokens"] != other.rows[-1]["train/total_tokens"]:
        found.append("its tokens are not those of the undisturbed run")
    if (status := run_json(run_dir)["status"]) != "finished":
        found.append(f"it is {status}: {run_json(run_dir)['reason']}")
    return found


def apart(undisturbed: Path, run_dir: Path) -> float:
    """The largest relative difference of loss or weights."""
    found = differences(curve_of(undisturbed), curve_of(run_dir))
    return max(found["train/loss"], found["weights"])
