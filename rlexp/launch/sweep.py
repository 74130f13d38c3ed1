"""A sweep's ledger, `sweep.json`: its jobs, what varies among them, and how each ended."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlexp.base import files, plain_json
from rlexp.base.errors import ConfigError
from rlexp.base.files import write_text

FILE = "sweep.json"
TEXT = (str, plain_json.NOTHING)
JOB: plain_json.Kinds = {"number": int, "folder": str, "overrides": list, "axes": dict, "status": str, "reason": TEXT,
                         "baseline": (int, plain_json.NOTHING), "job_id": TEXT, "label": str}  # fmt: skip


@dataclass
class Job:
    number: int
    folder: str  # inside the sweep's folder
    overrides: list[str]
    axes: dict[str, str] = field(default_factory=dict)  # the keys that vary in the sweep, with this job's values
    baseline: int | None = None  # number of the job that this one is compared with
    status: str = "waiting"  # or running, finished, failed, stopped, skipped (cannot be run)
    reason: str | None = None
    job_id: str | None = None  # the cluster's id, once the job was submitted
    token: str | None = None  # finds the job in the cluster's queue if its id was not written down
    predicted: int | None = None  # bytes that its largest rank would need, where it was skipped for its memory

    @property
    def label(self) -> str:
        return ", ".join(short(key, value) for key, value in self.axes.items()) or self.folder


def short(key: str, value: str) -> str:
    """`ring4` for a group's option, `max_length=2048` for a value."""
    leaf = key.lstrip("+").rpartition(".")[2]
    is_option = "." not in key and not value.lstrip("-").replace(".", "", 1).isdigit()
    return value if is_option else f"{leaf}={value}"


def axes_of(overrides: Iterable[Sequence[str]]) -> list[str]:
    """Return the keys whose values differ among the jobs, in the order in which they are given."""
    values: dict[str, set[str]] = {}
    jobs = [_split(each) for each in overrides]
    for job in jobs:
        for key, value in job.items():
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1 or any(key not in job for job in jobs)]


def _split(overrides: Sequence[str]) -> dict[str, str]:
    return {key: value for key, _, value in (each.partition("=") for each in overrides)}


class Sweep:
    """The jobs so far. The launcher that runs them writes the ledger; `compare` and `status` read it."""

    def __init__(self, folder: Path, name: str, *, kept: bool = True) -> None:
        self.folder, self.name, self.kept = folder, name, kept
        self.jobs: list[Job] = []
        self.families: dict[str, int] = {}  # the keys that a curve depends on → the first job with these values
        self.begun = False  # this process has written the ledger
        self._before = {job.number: job for job in read(folder)}

    def add(self, number: int, folder: str, overrides: Sequence[str]) -> Job:
        """Add a job, with its id and token where an interrupted sweep already submitted it."""
        known = self._before.get(number)
        if known is not None and known.overrides != list(overrides):
            raise ConfigError(
                f"hydra.sweep.dir={self.folder}: holds another sweep (its job {number} is "
                f"{' '.join(known.overrides)}, and would be {' '.join(overrides)}). Give another folder, or resume "
                f"that sweep by its own command."
            )
        same = next((each for each in self.jobs if each.folder == folder), None)
        if same is not None or (self.folder / folder).resolve() == self.folder.resolve():
            raise ConfigError(
                f"hydra.sweep.subdir={folder}: is {f'job {same.number}' if same else 'the sweep'}'s folder, and would "
                f"be job {number}'s too. Leave it out, or let it depend on the job, as ${{hydra.job.num}} does."
            )
        job = Job(number, folder, list(overrides))
        if known is not None:
            job.job_id, job.token = known.job_id, known.token
        self.jobs.append(job)
        keys = self.axes()
        for each in self.jobs:
            each.axes = {key: value for key, value in _split(each.overrides).items() if key in keys}
        return job

    def axes(self) -> list[str]:
        return axes_of(job.overrides for job in self._all())

    def _all(self) -> list[Job]:
        """Return all jobs, with those of an earlier process that this one has not reached yet."""
        numbers = {job.number for job in self.jobs}
        others = [job for number, job in self._before.items() if number not in numbers]
        return sorted([*self.jobs, *others], key=lambda job: job.number)

    def note(self, job: Job, status: str, reason: str | None = None) -> None:
        job.status, job.reason = status, reason
        self.write()

    def write(self) -> None:
        if not self.kept:  # a dry run
            return
        self.begun = True
        text = {
            "name": self.name,
            "command": sys.argv[1:],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "axes": self.axes(),
            "jobs": [dataclasses.asdict(job) | {"label": job.label} for job in self._all()],
        }
        try:
            write_text(self.folder / FILE, json.dumps(text, indent=2) + "\n")
        except OSError as error:  # a full disk must not end the other jobs; the file keeps its earlier content
            sys.stderr.write(f"rlexp: {self.folder / FILE} could not be written ({error.strerror}).\n")


def read(folder: Path) -> list[Job]:
    """Return the jobs of the sweep in a folder; empty where there is no sweep."""
    jobs = plain(folder).get("jobs", [])
    if not isinstance(jobs, list):
        raise _no_ledger(folder, "jobs")
    for place, job in enumerate(jobs):
        if plain_json.of_kinds(job, JOB) != job:
            raise _no_ledger(folder, f"job {place}")
    try:
        return [Job(**{key: value for key, value in job.items() if key != "label"}) for job in jobs]
    except TypeError as error:
        raise _no_ledger(folder, error) from None


def plain(folder: Path) -> dict[str, Any]:
    try:
        ledger = plain_json.loads(files.read_regular(folder / FILE))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _no_ledger(folder, error) from None
    return ledger if isinstance(ledger, dict) else {}


def _no_ledger(folder: Path, error: Exception | str) -> ConfigError:
    return ConfigError(f"{folder / FILE}: is not a sweep's ledger ({error}). Remove it, or restore it.")
