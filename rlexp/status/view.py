"""A folder's jobs at one moment, with the ends of their curves while these are written. One call asks Slurm about all
of them."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlexp.base import files, plain_json
from rlexp.base.errors import ConfigError
from rlexp.base.printable import printable
from rlexp.compare.runs import LIVE, runs_in, shown
from rlexp.launch import rank_progress, run_folder, sweep
from rlexp.launch.run_folder import LOCK, RANKS
from rlexp.launch.slurm import queue
from rlexp.launch.slurm.queue import Known, Silent
from rlexp.launch.sweep import Job
from rlexp.run_files import evaluations
from rlexp.run_files.curve_distance import SAMPLED, SCORE
from rlexp.run_files.metrics_jsonl import METRICS
from rlexp.status.state import ILL, Evidence, state_of

QUIET, STEPS = 300.0, 10  # a run is reported as silent after so many seconds and so many steps' time


class StatusError(ConfigError):
    """A folder without a run, or an option that makes no sense."""


LOCKS, PROCESSES = Path("/proc/locks"), Path("/proc")
# Lines of processes that wait for a lock have an arrow in the second place, and do not match.
_LOCK = re.compile(r"\d+: \w+ +\w+ +\w+ +-?\d+ ([0-9a-f]+):([0-9a-f]+):(\d+) ")


class Locks:
    """The file locks on this machine at one moment."""

    def __init__(self) -> None:
        try:
            locks = [_LOCK.match(line) for line in LOCKS.read_text().splitlines()]
        except OSError:
            locks = []
        self._held = {(int(each[1], 16), int(each[2], 16), int(each[3])) for each in locks if each}

    def held(self, path: Path) -> bool:
        try:
            file = path.stat()
        except OSError:
            return False
        return (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino) in self._held

    def alive(self, folder: Path, known: Mapping[str, Any]) -> bool | None:
        """Whether the process that wrote `known` into a folder, or one of its ranks, lives; None on another machine."""
        if self.held(folder / LOCK) or self.held(folder / RANKS):
            return True
        if known.get("host") != socket.gethostname() or not (PROCESSES / "self").exists():
            return None
        return has_open(known.get("pid"), folder / LOCK)


def has_open(process: Any, path: Path) -> bool:
    """Whether a process has a file open.

    The kernel does not list the locks of every file system, and another process may have this id by now.
    """
    place = PROCESSES / str(process) / "fd"
    try:
        files = list(place.iterdir())
    except PermissionError:
        return True  # it is another user's process
    except OSError:
        return False
    return any(_leads_to(file, str(path.resolve())) for file in files)


def _leads_to(link: Path, path: str) -> bool:
    try:
        return os.readlink(link) == path
    except OSError:  # the file is closed by now
        return False


ROWS = 50  # the rows from which pace and speed are computed
BYTES, MOST = 1 << 16, 1 << 22  # bytes read at first, and at most, if the first do not have all values


@dataclass(frozen=True)
class Curve:
    """The state of a curve. All but the step may be missing from a row."""

    step: int = 0
    loss: float | None = None
    score: float | None = None  # of a run that samples: that of its last rollout
    tokens_per_second: float | None = None
    step_seconds: float | None = None


def read_curve(path: Path) -> Curve:
    size = BYTES
    while True:
        rows, whole = last_rows(path, size)
        sampled = bool(rows) and any(name.startswith(SAMPLED) for name in rows[-1])
        lacking = not rows or (sampled and _latest(rows, SCORE) is None)
        if whole or size >= MOST or not lacking:
            return _curve(rows)
        size *= 8


def last_rows(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the whole rows in a file's last bytes, and whether these are all of its rows."""
    try:
        with files.opened(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(start)
            lines = file.read(size).split(b"\n")
    except OSError:
        return [], True
    rows = []
    for line in lines[1 if start else 0 : -1]:
        try:
            row = plain_json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows, start == 0


def _curve(rows: Sequence[dict[str, Any]]) -> Curve:
    if not rows:
        return Curve()
    taken = [row for row in rows if row["step"]]  # the row of step 0 has held-out values alone
    steady = taken[-ROWS:]
    steady = steady[1:] if len(steady) == len(taken) > 1 else steady  # the first step allocates buffers
    timed = [row for row in steady if _number(row.get("train/step_seconds"))]
    seconds = sum(row["train/step_seconds"] for row in timed)
    tokens = sum(row["train/tokens"] for row in timed if _number(row.get("train/tokens")))
    speed, pace = tokens / seconds if tokens and seconds else None, seconds / len(timed) if timed else None
    return Curve(rows[-1]["step"], _latest(rows[-1:], "train/loss"), _latest(rows, SCORE), speed, pace)


def _latest(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if _number(row.get(name))), None)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


@dataclass(frozen=True)
class JobRow:
    """The state of one job."""

    label: str
    folder: Path
    state: str
    why: str
    curve: Curve
    held_out: dict[str, float]  # values of the last evaluation
    steps: int | None  # planned
    seconds_left: float | None  # at the pace of the last steps
    ranks: list[dict[str, Any]]
    requeues: list[Any]
    job_id: str | None
    slurm: Known | None
    quiet: float | None  # seconds without a sign of life, if they are many
    live: bool  # it may still change by itself

    @property
    def peak(self) -> tuple[int, str, int] | None:
        """Return the largest peak of any rank so far: its bytes, phase and rank."""
        return self._largest("peaks")

    @property
    def tensors(self) -> tuple[int, str, int] | None:
        """Return the same of live tensors, where they were counted."""
        return self._largest("tensors")

    def _largest(self, kind: str) -> tuple[int, str, int] | None:
        counted = (rank for rank in self.ranks if isinstance(rank.get(kind), dict))
        peaks = [(peak, phase, rank["rank"]) for rank in counted for phase, peak in rank[kind].items()]
        return max(peaks, key=lambda each: each[0], default=None)


@dataclass(frozen=True)
class Look:
    title: str
    rows: list[JobRow]
    silent: str = ""  # why Slurm gave no answer

    @property
    def live(self) -> bool:
        return any(row.live for row in self.rows)

    @property
    def ill(self) -> bool:
        return any(row.state in ILL for row in self.rows)


@dataclass
class StatusView:
    path: Path
    _recalled: dict[str, Known] = field(default_factory=dict)  # jobs that have ended, since Slurm's accounting is slow

    def look(self) -> Look:
        locks = Locks()
        entries = list(_entries(self.path, locks))
        if not entries:
            raise _nothing(self.path)
        slurm, silent = self._ask([each.job_id for each in entries if each.job_id is not None])
        seen = [replace(each, slurm=slurm.get(each.job_id or ""), answered=not silent) for each in entries]
        return Look(shown(self.path.resolve().name), list(map(_row, seen)), silent)

    def _ask(self, jobs: Sequence[str]) -> tuple[dict[str, Known], str]:
        try:
            queued = queue.look(jobs)
        except Silent as error:
            return self._recalled, str(error)
        forgotten = [job for job in jobs if job not in queued and job not in self._recalled]
        self._recalled |= {job: known for job, known in queue.recall(forgotten).items() if not known.alive}
        return self._recalled | queued, ""


def _entries(path: Path, locks: Locks) -> Iterator[Evidence]:
    """Yield the jobs of a sweep, a run, or a folder of them, as their folders show them."""
    for folder in runs_in(path):
        name = shown((path.resolve() if folder is path else folder).name)
        if not (folder / sweep.FILE).exists():
            yield _seen(folder, name, locks)
            continue
        sweeps = locks.alive(folder, sweep.plain(folder))
        for job in sweep.read(folder):
            label = job.label if folder is path else f"{name} {job.label}"
            yield _seen(folder / job.folder, label, locks, job, sweeps)


def _seen(folder: Path, label: str, locks: Locks, job: Job | None = None, sweeps: bool | None = None) -> Evidence:
    known = run_folder.read(folder)
    # Without a cluster, a ledger's ids are process ids, and have no token.
    listed = job.job_id if job is not None and job.token is not None else None
    job_id = listed or known.get("job_id")
    job_id = job_id if isinstance(job_id, str) and re.fullmatch(r"\d+(_\d+)?", job_id) else None
    return Evidence(folder, label, known, locks.alive(folder, known), job, sweeps, job_id)


def _nothing(path: Path) -> StatusError:
    if not path.is_dir():
        return StatusError(f"{path}: no such folder. Relative paths start at {Path.cwd()}.")
    if (path / sweep.FILE).exists():
        return StatusError(f"{path / sweep.FILE}: names no job. Give a sweep's folder, or a run's.")
    return StatusError(
        f"{path}: holds no run: no {sweep.FILE}, no run.json, and no folder with one of them. Give a sweep's "
        f"folder, or a run's."
    )


def _row(seen: Evidence) -> JobRow:
    state, why = state_of(seen)
    curve, steps = read_curve(seen.folder / METRICS), seen.known.get("steps")
    steps = steps if type(steps) is int else None
    # Its launcher is about to start it, or has not noticed its end yet.
    due = seen.job is not None and seen.job.status in LIVE and bool(seen.sweeps)
    left = None
    if state == "running" and steps is not None and curve.step_seconds is not None:
        left = max(0, steps - curve.step) * curve.step_seconds
    requeues = seen.known.get("requeues")
    return JobRow(
        label=printable(seen.label),
        folder=seen.folder,
        state=printable(state),
        why=printable(why),
        curve=curve,
        held_out=evaluations.values_of(seen.known.get("evaluated") or {}),
        steps=steps,
        seconds_left=left,
        ranks=[_printable(each) for each in rank_progress.read(seen.folder)],
        requeues=[_printable(each) for each in requeues or []],
        job_id=seen.job_id,
        slurm=seen.slurm,
        quiet=_quiet(seen.folder, curve) if state == "running" else None,
        live=state in LIVE or (seen.slurm is not None and seen.slurm.alive) or due,
    )


def _printable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a rank or a requeue with texts that a terminal may have."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in facts.items()}


def _quiet(run: Path, curve: Curve) -> float | None:
    """Return for how long a run has written nothing, if that is long and its steps are not that slow."""
    last = 0.0
    for name in (METRICS, rank_progress.FILE, "run.json"):
        try:
            last = max(last, (run / name).stat().st_mtime)
        except OSError:
            continue
    seconds = time.time() - last if last else 0.0
    return seconds if seconds > max(QUIET, STEPS * (curve.step_seconds or 0.0)) else None
