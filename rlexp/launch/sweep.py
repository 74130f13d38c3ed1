"""A sweep's folder: `sweep.json`, which jobs there are, what varies among them, and how each ended."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlexp.errors import ConfigError

FILE = "sweep.json"
ENDED = ("finished", "skipped", "failed", "stopped")


@dataclass
class Job:
    number: int
    folder: str  # beneath the sweep's
    overrides: list[str]
    axes: dict[str, str] = field(default_factory=dict)  # what varies in the sweep, and this job's values
    baseline: int | None = None  # the job that this one is held against
    status: str = "waiting"  # running, finished, failed, stopped, or skipped: it cannot be run
    reason: str | None = None

    @property
    def label(self) -> str:
        return ", ".join(short(key, value) for key, value in self.axes.items()) or self.folder


def short(key: str, value: str) -> str:
    """`ring4` for a group's option, `max_length=2048` for a value."""
    leaf = key.lstrip("+").rpartition(".")[2]
    is_option = "." not in key and not value.lstrip("-").replace(".", "", 1).isdigit()
    return value if is_option else f"{leaf}={value}"


def axes_of(overrides: Iterable[Sequence[str]]) -> list[str]:
    """The keys whose values differ among the jobs, in the order in which they are given."""
    values: dict[str, set[str]] = {}
    jobs = [_split(each) for each in overrides]
    for job in jobs:
        for key, value in job.items():
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1 or any(key not in job for job in jobs)]


def _split(overrides: Sequence[str]) -> dict[str, str]:
    return {key: value for key, _, value in (each.partition("=") for each in overrides)}


class Sweep:
    """The jobs so far. Opened by the launcher that runs them; read by whoever looks at the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.jobs: list[Job] = []
        self.begun = False  # its ledger is ours
        self._before = {job.number: job for job in read(folder)}

    def add(self, number: int, folder: str, overrides: Sequence[str]) -> Job:
        """A job, or what a sweep that was interrupted knows of it."""
        known = self._before.get(number)
        if known is not None and known.overrides != list(overrides):
            raise ConfigError(
                f"hydra.sweep.dir={self.folder}: holds another sweep (its job {number} is "
                f"{' '.join(known.overrides)}, and would be {' '.join(overrides)}). Give another folder, or take up "
                f"that one by its own command."
            )
        job = Job(number, folder, list(overrides))
        self.jobs.append(job)
        for each, axes in zip(self.jobs, self._values(), strict=True):
            each.axes = axes
        return job

    def _values(self) -> list[dict[str, str]]:
        keys = axes_of(job.overrides for job in self.jobs)
        return [{key: value for key, value in _split(job.overrides).items() if key in keys} for job in self.jobs]

    def note(self, job: Job, status: str, reason: str | None = None) -> None:
        job.status, job.reason = status, reason
        self.write()

    def write(self) -> None:
        self.begun = True
        text = {
            "name": self.name,
            "command": sys.argv[1:],
            "axes": axes_of(job.overrides for job in self.jobs),
            "jobs": [dataclasses.asdict(job) | {"label": job.label} for job in self.jobs],
        }
        temporary = self.folder / f".{FILE}.tmp"
        temporary.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / FILE)


def read(folder: Path) -> list[Job]:
    """The jobs of the sweep that stands in a folder; none where there is none."""
    return [
        Job(**{key: value for key, value in job.items() if key != "label"}) for job in plain(folder).get("jobs", [])
    ]


def plain(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{folder / FILE}: is not the ledger of a sweep ({error}). Remove it, or restore it."
        ) from None
    return found
