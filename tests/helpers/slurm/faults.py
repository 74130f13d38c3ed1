"""Plant faults in the jobs of a sweep, and collect what Slurm and the sweep report about each."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.helpers.slurm.jobs import QUICK, Sweep, struck
from tests.helpers.slurm.lab import Lab

STEPS = 4
EACH = (*QUICK, f"train.max_steps={STEPS}", "checkpoint.save_every=2", "launch.rank_memory_gb=1.5",
        "hydra.launcher.poll_seconds=1", "hydra.launcher.array_parallelism=4")  # fmt: skip


@dataclass(frozen=True)
class Fault:
    rank: int
    where: str
    how: str
    told: str  # regular expression of the reason in the ledger
    finishes: bool = False  # the job finishes in spite of it

    @property
    def name(self) -> str:
        return f"{self.where} {self.how} rank{self.rank}"

    @property
    def planted(self) -> str:
        return f"rank={self.rank},where={self.where},how={self.how}"


@dataclass(frozen=True)
class Part:
    """A sweep with one job for each fault, and a healthy job for each None."""

    name: str
    shape: tuple[str, ...]
    faults: tuple[Fault | None, ...]


@dataclass(frozen=True)
class Accounted:
    """What accounting knows of a job. Times are whole seconds since 1970."""

    state: str
    code: str
    nodes: str
    begun: float
    ended: float


@dataclass(frozen=True)
class Seen:
    """How a job ended."""

    fault: Fault | None
    status: str
    reason: str
    at: float | None  # when the fault happened; None if it never did
    slurm: Accounted
    ended: float  # seconds from the fault until the job ended in Slurm
    told: float  # seconds until the launcher printed it
    line: str
    shown: str  # by rlexp.status, of the whole sweep
    run_dir: Path


def run_parts(lab: Lab, folder: Path, parts: Sequence[Part], within: float) -> dict[str, list[Seen]]:
    """Run all sweeps at once. Return the jobs of each by the part's name."""
    sweeps = [begin(lab, folder / part.name, part) for part in parts]
    try:
        said = watch(sweeps, parts, within)
        return {
            part.name: [seen_of(sweep, part, number, said) for number in range(len(part.faults))]
            for part, sweep in zip(parts, sweeps, strict=True)
        }
    finally:
        for sweep in sweeps:
            sweep.kill()


def begin(lab: Lab, folder: Path, part: Part) -> Sweep:
    planted = ";".join(f"{number}:{fault.planted}" for number, fault in enumerate(part.faults) if fault)
    folder.mkdir()
    return Sweep(lab, folder, *EACH, *part.shape, f"seed=range({len(part.faults)})", fault=planted)


def watch(sweeps: Sequence[Sweep], parts: Sequence[Part], within: float) -> dict[tuple[str, int], float]:
    """Wait until all sweeps have ended. Return when the launcher printed each job's end, to a tenth of a second."""
    first: dict[tuple[str, int], float] = {}
    deadline, alive = time.monotonic() + within, True
    while alive:
        assert time.monotonic() < deadline, f"not within {within:g} s: {[sweep.told() for sweep in sweeps]}"
        time.sleep(0.1)
        alive = any(sweep.process.poll() is None for sweep in sweeps)
        for sweep, part in zip(sweeps, parts, strict=True):
            said = sweep.said
            for number in range(len(part.faults)):
                if line_of(said, number):
                    first.setdefault((part.name, number), time.time())
    return first


def line_of(said: str, number: int) -> str:
    """Return the launcher's line about the end of a job. The only job of a sweep is named by its folder."""
    return next((line for line in said.splitlines() if re.match(rf"rlexp: (seed=)?{number} is ", line)), "")


def seen_of(sweep: Sweep, part: Part, number: int, said: dict[tuple[str, int], float]) -> Seen:
    job = sweep.jobs()[number]
    at = next((note["at"] for note in struck(sweep.folder.parent) if note["job"] == str(number)), None)
    known = accounted(sweep.lab, job["job_id"])
    return Seen(
        part.faults[number], job["status"], job["reason"] or "", at, known,
        # Slurm cuts fractions off: the job may have ended up to one second later.
        known.ended + 1 - (at or 0), said.get((part.name, number), 0) - (at or 0),
        line_of(sweep.said, number), shown(sweep), sweep.folder / job["folder"],
    )  # fmt: skip


@functools.cache
def shown(sweep: Sweep) -> str:
    """Return what `rlexp.status` prints of a sweep that has ended, as one line."""
    done = subprocess.run(
        [sys.executable, "-m", "rlexp.status", str(sweep.folder)], capture_output=True, text=True, timeout=240,
        check=False, env=os.environ | sweep.lab.env(),
    )  # fmt: skip
    return " ".join(done.stdout.split())


def accounted(lab: Lab, job: str) -> Accounted:
    """Return what accounting knows of a job, which it learns a moment after the job's end."""
    for _ in range(50):
        text = lab.run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}",
                       "--format=State,ExitCode,NodeList,Start,End")  # fmt: skip
        state, code, nodes, begun, ended = (text.splitlines() or ["||||"])[-1].split("|")
        if ended not in ("", "Unknown"):
            return Accounted(state, code, nodes, seconds(begun), seconds(ended))
        time.sleep(0.2)
    raise AssertionError(f"accounting does not know the end of job {job}: {text}")


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text[:1].isdigit() else 0.0
