"""A run, read back from its folder, or from W&B: its curve in columns, and what must be known to trust it."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.compare.difference import Column, Steps
from rlexp.compare.samples import Record
from rlexp.errors import UserError
from rlexp.launch import folder, sweep, whereabouts
from rlexp.sinks.rollouts import ROLLOUTS

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
LIVE = ("running", "waiting")
SIZES = ("world_size", "ring_size", "dp_size", "batch_size", "micro_batch_size", "grad_acc")


class CompareError(UserError):
    """Runs that are not there, or that cannot be compared."""


@dataclass(eq=False)
class Run:
    """Itself and no other. `columns` have a value for each of `steps`, NaN where the run has none there."""

    name: str
    label: str
    path: Path | None
    status: str = "finished"
    reason: str | None = None
    steps: Steps = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: dict[str, Column] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)  # of each rank, its peaks by phase
    total_steps: int | None = None  # that it was to take
    baseline: Path | None = None  # the folder of the run that its sweep holds it against
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        return str(self.config.get("train", {}).get("precision", "bf16"))

    @property
    def layout(self) -> str:
        """`4 × 2`: ring and replicas."""
        return f"{self.sizes['ring_size']} × {self.sizes['dp_size']}" if "dp_size" in self.sizes else "–"

    @cached_property
    def record(self) -> Record | None:
        """Of the samples that it drew, read when it is asked for; None where there is none."""
        path = self.path / ROLLOUTS if self.path is not None else None
        return Record(path) if path is not None and path.is_file() else None

    def column(self, name: str) -> Column:
        return self.columns.get(name, np.full(len(self.steps), np.nan))


@dataclass
class Group:
    """What a comparison is made of. `axes` are what a sweep varies on purpose."""

    title: str
    runs: list[Run]
    axes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Reader:
    """Reads files again only when they have changed, so that a live report costs what is new."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Run]] = {}

    def group(self, path: Path) -> Group | None:
        """A sweep's folder, a run's, or one that holds runs; None where there is nothing of ours."""
        if (path / sweep.FILE).exists():
            return self._sweep(path)
        if is_run(path):
            return Group(path.name, [self.run(path)])
        if not path.is_dir():
            return None
        inside = sorted(each for each in path.iterdir() if each.is_dir())
        ours = [each for each in inside if is_run(each) or (each / sweep.FILE).exists()]
        groups = [group for each in ours if (group := self.group(each)) is not None]
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
            run = self.run(where) if is_run(where) else Run(job.folder, job.label, where, job.status, job.reason)
            run.name, run.label = f"{path.name}/{job.folder}", job.label
            if job.status in ("skipped", "failed") and run.status != "finished":
                run.status, run.reason = job.status, job.reason
            elif not is_run(where) and job.status in LIVE and not live:
                run.status, run.reason = "stopped", "its sweep was stopped before it; the same command goes on with it"
            run.baseline = None if job.baseline is None else folders.get(job.baseline)
            runs.append(run)
        return Group(path.name, runs, list(plain.get("axes", [])))

    def run(self, path: Path) -> Run:
        stamp = tuple(_stamp(path / name) for name in (METRICS, ROLLOUTS, "run.json", whereabouts.FILE))
        key = (sum(each[0] for each in stamp), max(each[1] for each in stamp))
        known = self._known.get(path)
        if known is not None and known[0] == key:
            run = known[1]
            run.status, run.reason = ended(folder.read(path))  # a process that is killed changes no file
            return run
        run = read_run(path)
        self._known[path] = (key, run)
        return run


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, "run.json"))


def merge(groups: Iterable[Group]) -> Group:
    """Several into one; a run that was given twice is one, and each has a name and a label of its own."""
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
    return Group(
        ", ".join(group.title for group in groups),
        runs,
        list(dict.fromkeys(axis for group in groups for axis in group.axes)),
        [note for group in groups for note in group.notes],
    )


def read_run(path: Path) -> Run:
    """What a run's folder says, as far as it is there and whole."""
    known = folder.read(path)
    notes: list[str] = []
    where = str(path)
    steps, columns = read_columns(path / METRICS, notes)
    config = read_config(path / CONFIG, notes)
    if not known:
        notes.append(f"{where}: has no run.json, so what its curve depends on is not known")
    status, reason = ended(known)
    return Run(
        shown(path.name),
        shown(path.resolve().name),
        path,
        status,
        reason,
        steps,
        columns,
        config,
        known.get("identity", {}),
        known.get("sizes", {}),
        whereabouts.read(path),
        notes=notes,
        total_steps=known.get("steps"),
    )


def shown(name: str) -> str:
    """A file's name as text, whatever bytes it has."""
    return os.fsencode(name).decode("utf-8", "replace")


def read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), enum_to_str=True)
    except FileNotFoundError:
        notes.append(f"{path.parent}: has no {path.name}, so its settings are not known")
        return {}
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        notes.append(f"{path}: cannot be read, so the run's settings are not known ({str(error).splitlines()[0]})")
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def ended(known: Mapping[str, Any]) -> tuple[str, str | None]:
    """As run.json says, unless it says `running` and its process is gone: killed, it could not say so."""
    if known.get("status") != "running":
        return str(known.get("status", "stopped")), known.get("reason")
    if not alive(known):
        return "stopped", "its process is gone; the same command goes on with it"
    return "running", None


def alive(known: Mapping[str, Any]) -> bool:
    """Whether the process lives that wrote this; of another machine's, that is not known."""
    if known.get("host") != socket.gethostname() or not Path("/proc/self").exists():
        return True
    return Path(f"/proc/{known.get('pid')}").exists()


def read_columns(path: Path, notes: list[str]) -> tuple[Steps, dict[str, Column]]:
    """The rows of metrics.jsonl as columns. What is not whole is left out, and said."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return columns_of([])
    if lines and not lines[-1].endswith(b"\n"):
        notes.append(f"{path}: its last line is torn, and left out")
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            notes.append(f"{path}:{number}: is not JSON, and left out")
    whole = [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
    if len(whole) < len(rows):
        notes.append(f"{path}: {len(rows) - len(whole)} rows have no step, and are left out")
    return columns_of(whole)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Steps, dict[str, Column]]:
    """By step, in their order; of a step that is there twice, the last."""
    latest = {row["step"]: row for row in rows}
    steps = np.array(sorted(latest), dtype=np.int64)
    alike: dict[tuple[str, ...], list[int]] = {}  # the places of rows with the same names: nearly all have
    for place, step in enumerate(steps.tolist()):
        alike.setdefault(tuple(latest[step]), []).append(place)
    columns: dict[str, Column] = {}
    for names, places in alike.items():
        block = _block([latest[step] for step in steps[places].tolist()], len(names))
        for name, values in zip(names, block.T, strict=True):
            if name != "step" and not np.isnan(values).all():
                columns.setdefault(name, np.full(len(steps), np.nan))[places] = values
    return steps, columns


def _block(rows: Sequence[Mapping[str, Any]], width: int) -> Column:
    """Rows × names; what is no number is none."""
    flat = itertools.chain.from_iterable(row.values() for row in rows)
    try:
        return np.fromiter(flat, np.float64, len(rows) * width).reshape(len(rows), width)
    except (TypeError, ValueError):
        numbers = [[v if isinstance(v, int | float) else np.nan for v in row.values()] for row in rows]
        return np.array(numbers, dtype=np.float64).reshape(len(rows), width)


def settings(run: Run) -> dict[str, str]:
    """The configuration, flat, each value as text."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value if isinstance(value, str) else json.dumps(value)

    walk("", run.config)
    return flat
