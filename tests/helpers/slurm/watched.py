"""Runs under Slurm that are disturbed: which steps they really computed, how often, and how their curves differ."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.curves import differences, excesses
from bench.resume import curve_of
from tests.helpers.runs import run_json, steps_of
from tests.helpers.slurm.jobs import FAULTY

TAKEN = "taken.jsonl"


def paced(seconds: float, folder: Path) -> dict[str, str]:
    """Return the environment that slows a command's ranks down, and notes each computed step in the folder."""
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
    """Return how many steps were computed again."""
    return sum(times - 1 for times in Counter(each.step for each in steps).values())


def starts(steps: list[Taken]) -> list[int]:
    return sorted({each.start for each in steps})


def waited(steps: list[Taken], since: float, start: int) -> float:
    """Return the seconds from the disturbance to the first step of a later start."""
    return min(each.at for each in steps if each.start >= start and each.at > since) - since


def wrong_about(undisturbed: Path, run_dir: Path) -> list[str]:
    """Return how a disturbed run differs from an undisturbed one: steps, curve, weights, tokens, status."""
    one, other = curve_of(undisturbed), curve_of(run_dir)
    expected = [row["step"] for row in one.rows]
    if steps_of(run_dir) != expected:
        return [f"its steps are {steps_of(run_dir)}"]
    wrong = [*excesses(one, other)]
    if one.rows[-1]["train/total_tokens"] != other.rows[-1]["train/total_tokens"]:
        wrong.append("its tokens are not those of the undisturbed run")
    if (status := run_json(run_dir)["status"]) != "finished":
        wrong.append(f"it is {status}: {run_json(run_dir)['reason']}")
    return wrong


def apart(undisturbed: Path, run_dir: Path) -> float:
    """Return the largest relative difference of loss or weights."""
    apart = differences(curve_of(undisturbed), curve_of(run_dir))
    return max(apart["train/loss"], apart["weights"])
