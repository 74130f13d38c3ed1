"""A run read back from its folder: its curve as columns, its configuration, and how it ended."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlexp.base import files, plain_yaml
from rlexp.base.errors import UserError
from rlexp.base.printable import printable
from rlexp.launch import preflight_check, rank_progress, run_folder, sweep
from rlexp.run_files import deal_json
from rlexp.run_files.curve_distance import Column, Steps
from rlexp.run_files.deal_json import DEAL, StepDeal
from rlexp.run_files.metrics_jsonl import METRICS, read_columns
from rlexp.run_files.rollouts_jsonl import ROLLOUTS, Record

CONFIG = "config.yaml"
LIVE = ("running", "waiting")
SIZES = (
    *("world_size", "ring_size", "dp_size", "batch_size"),
    *("micro_batch_size", "max_tokens_per_micro_batch", "grad_acc"),
)


class CompareError(UserError):
    """Runs that are missing or cannot be compared."""


@dataclass(eq=False)
class LoggedRun:
    """One run, equal only to itself. Each column has a value for each of `steps`, NaN where it is missing."""

    name: str
    label: str
    path: Path | None
    status: str = "finished"
    reason: str | None = None
    steps: Steps = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: dict[str, Column] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)  # for each rank, its peaks by phase
    predicted: int | None = None  # bytes of its peak, where it was rehearsed
    deal: StepDeal | None = None  # which rank computes what in one step
    cores: int | None = None  # of the machine, or of rank 0's node
    total_steps: int | None = None  # the number of steps planned
    warmup_steps: int | None = None  # to which a share of them came
    baseline: Path | None = None  # the folder of the run that its sweep compares it with
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        return str(self.settings_of("train").get("precision", "bf16"))

    def settings_of(self, group: str) -> Mapping[str, Any]:
        """Return the settings of a group; none where the run's file has something else in its place."""
        settings = self.config.get(group)
        return settings if isinstance(settings, dict) else {}

    @property
    def shared_cores(self) -> bool:
        """Whether ranks on a CPU took turns on its cores."""
        ranks = self.sizes.get("world_size", 0) if isinstance(self.sizes, dict) else 0
        return self.cores is not None and self.settings_of("launch").get("device") == "cpu" and ranks > self.cores

    @cached_property
    def record(self) -> Record | None:
        """The record of the samples that the run drew, read on first use; None where there is none."""
        path = self.path / ROLLOUTS if self.path is not None else None
        return Record(path) if path is not None and path.is_file() else None

    def column(self, name: str) -> Column:
        return self.columns.get(name, np.full(len(self.steps), np.nan))


@dataclass
class Group:
    """The runs to compare. `axes` are the keys that a sweep varies on purpose."""

    title: str
    runs: list[LoggedRun]
    axes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class RunReader:
    """Read runs, and read a file again only when it has changed, so that a live report costs only what is new."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], LoggedRun]] = {}

    def group(self, path: Path) -> Group | None:
        """Read a sweep's folder, a run's, or a folder of runs; None where there is no run."""
        if (path / sweep.FILE).exists():
            return self._sweep(path)
        if is_run(path):
            return Group(path.name, [self.run(path)])
        groups = [group for each in runs_in(path) if (group := self.group(each)) is not None]
        if not groups:
            return None
        merged = merge(groups)
        merged.title = path.resolve().name
        return merged

    def _sweep(self, path: Path) -> Group:
        plain, jobs = sweep.plain(path), sweep.read(path)
        folders = {job.number: path / job.folder for job in jobs}
        live = alive(plain)
        runs = []
        for job in jobs:
            where = folders[job.number]
            run = self.run(where) if is_run(where) else LoggedRun(job.folder, job.label, where, job.status, job.reason)
            run.name, run.label = f"{path.name}/{job.folder}", job.label
            run.predicted = run.predicted or job.predicted
            if job.status in ("skipped", "failed") and run.status != "finished":
                run.status, run.reason = job.status, job.reason
            elif not is_run(where) and job.status in LIVE and not live:
                run.status, run.reason = "stopped", "its sweep was stopped before this job; the same command resumes it"
            run.baseline = None if job.baseline is None else folders.get(job.baseline)
            runs.append(run)
        return Group(path.name, runs, list(plain.get("axes", [])))

    def run(self, path: Path) -> LoggedRun:
        stamp = tuple(_stamp(path / name) for name in (METRICS, ROLLOUTS, DEAL, "run.json", rank_progress.FILE))
        key = (sum(each[0] for each in stamp), max(each[1] for each in stamp))
        known = self._known.get(path)
        if known is not None and known[0] == key:
            run = known[1]
            run.status, run.reason = ended(run_folder.read(path))  # a killed process changes no file
            return run
        run = read_run(path)
        self._known[path] = (key, run)
        return run


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, "run.json"))


def runs_in(path: Path) -> list[Path]:
    """Return the folder itself if it is a run's or a sweep's, else those of runs and sweeps in it."""

    def ours(folder: Path) -> bool:
        return is_run(folder) or (folder.is_dir() and (folder / sweep.FILE).exists())

    return [path] if ours(path) else sorted(filter(ours, path.iterdir())) if path.is_dir() else []


def merge(groups: Iterable[Group]) -> Group:
    """Merge groups into one. A run given twice appears once, and every run gets a name and a label of its own."""
    groups = list(groups)
    if len(groups) == 1:
        return groups[0]
    runs = list({run.path.resolve() if run.path else run.name: run for group in groups for run in group.runs}.values())
    several = {id(run): group.title for group in groups if len(group.runs) > 1 for run in group.runs}
    labels, names = [run.label for run in runs], [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1 and run.path is not None:
            run.name = shown(str(run.path))
    for run, label in zip(runs, labels, strict=True):
        if labels.count(label) > 1:
            run.label = f"{several[id(run)]} {label}" if id(run) in several else run.name
    labels = [run.label for run in runs]
    for run in runs:
        if labels.count(run.label) > 1:
            run.label = run.name
    axes = list(dict.fromkeys(axis for group in groups for axis in group.axes))
    notes = [note for group in groups for note in group.notes]
    return Group(", ".join(group.title for group in groups), runs, axes, notes)


def read_run(path: Path) -> LoggedRun:
    """Read a run's folder, as far as its files are there and whole."""
    known, prediction = run_folder.read(path), preflight_check.read(path)
    notes: list[str] = []
    steps, columns = read_columns(path / METRICS, notes)
    config = read_config(path / CONFIG, notes)
    if not known:
        notes.append(f"{path}: has no run.json, so what its curve depends on is not known")
    status, reason = ended(known)
    return LoggedRun(
        shown(path.name), shown(path.resolve().name), path, status, reason, steps, columns, config,
        known.get("identity", {}), known.get("sizes", {}), rank_progress.read(path),
        predicted=None if prediction is None else prediction.peak, deal=read_deal(path / DEAL, notes),
        cores=known.get("cores"),
        total_steps=known.get("steps"), warmup_steps=known.get("warmup_steps"), notes=notes,
    )  # fmt: skip


def shown(name: str) -> str:
    """Return a file name as text that prints, whatever bytes it has."""
    return printable(os.fsencode(name).decode("utf-8", "replace"))


def read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        config = plain_yaml.load(files.read_regular(path).decode())
    except FileNotFoundError:
        notes.append(f"{path.parent}: has no {path.name}, so its settings are not known")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        notes.append(f"{path}: cannot be read, so the run's settings are not known ({str(error).splitlines()[0]})")
        return {}
    return {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}


def read_deal(path: Path, notes: list[str]) -> StepDeal | None:
    try:
        return deal_json.read(path)
    except (OSError, ValueError) as error:
        notes.append(f"{path}: cannot be read, so the report does not show what each rank computes "
                     f"({str(error).splitlines()[0]})")  # fmt: skip
        return None


def ended(known: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return status and reason as run.json has them, or `stopped` where it says `running` and the process is gone."""
    if known.get("status") != "running":
        return str(known.get("status", "stopped")), known.get("reason")
    if not alive(known):
        return "stopped", "its process is gone; the same command resumes it"
    return "running", None


def alive(known: Mapping[str, Any]) -> bool:
    """Whether the process that wrote this still lives. A process of another machine is taken to live."""
    if known.get("host") != socket.gethostname() or not Path("/proc/self").exists():
        return True
    return Path(f"/proc/{known.get('pid')}").exists()


def settings(run: LoggedRun) -> dict[str, str]:
    """Return the configuration as flat keys with their values as text."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value if isinstance(value, str) else json.dumps(value, default=str)

    walk("", run.config)
    return flat
