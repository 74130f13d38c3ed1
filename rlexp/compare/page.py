"""The report page: one html file that shows a comparison and opens from disk, without a network.

The page holds its numbers as base64 of little-endian arrays, one block per metric, and decodes a block when its metric
is chosen. So a page of 50 runs opens as quickly as one of four. Names of runs and metrics, errors and values of
configurations are text of unknown origin: they reach the page as escaped JSON, and its script makes text nodes of them,
never markup. A content security policy lets nothing run or load but the page's own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from string import Template
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlexp.base import plain_json
from rlexp.run_files.deal_json import StepDeal

UPLOT_VERSION = "1.6.32"
# The page's own scripts, in the order in which they are joined.
SCRIPTS = (
    *("elements", "numbers", "arrays", "chosen", "colours", "curves", "charts", "zoom", "readout", "section"),
    *("head", "lengths", "deals", "cost", "runs", "configurations", "start"),
)

Status = Literal["finished", "running", "stopped", "failed", "skipped"]
Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Banner:
    """The verdict at the top of the page."""

    status: Literal["agree", "apart", "unproven", "none"]
    headline: str
    details: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Knots:
    """Tokens and seconds at some steps (the knots). The page interpolates between them. NaN or empty: not known."""

    steps: Integers
    tokens: Floats
    seconds: Floats


@dataclass(frozen=True)
class RankMemory:
    """One rank's peaks by phase, in bytes: of its memory, and of its live tensors where they were counted."""

    rank: int
    peaks: dict[str, int]
    tensors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HighestPeak:
    """The highest peak of all ranks and steps."""

    bytes: int
    rank: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class LengthPart:
    """The held-out rows of some lengths at the last evaluation; None where a value is not known."""

    name: str  # its bounds, in tokens
    examples: int
    loss: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None


@dataclass(frozen=True)
class RunCard:
    """All that the page says about one run; None where it is not known."""

    name: str
    label: str
    status: Status
    reason: str = ""  # why it has not finished, or was not run
    baseline: bool = False
    family: int = 0  # runs of one family share a baseline
    baseline_label: str | None = None
    path: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    last_loss: float | None = None
    last_score: float | None = None  # for a run that draws its own samples
    held_out: str = ""  # the last evaluation, in words
    worst_difference: float | None = None  # of the loss, relative
    compared_upto: int | None = None  # the last step before its samples differ from the baseline's; None: all are
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    efficiency: float | None = None  # 1.0 is the baseline's speed
    memory: list[RankMemory] = field(default_factory=list)
    predicted_bytes: int | None = None  # what a rehearsal said of its peak
    peak_bytes: int | None = None
    peak_rank: int | None = None
    peak_phase: str | None = None
    tensors: HighestPeak | None = None  # live tensors, where they were counted: on CPU, memory is the process's
    lengths: list[LengthPart] = field(default_factory=list)
    deal: StepDeal | None = None  # which rank computes what in one step
    clock: Knots | None = None


@dataclass(frozen=True)
class Worst:
    """Where a metric lies furthest from its baseline."""

    run: int
    step: int
    value: float


@dataclass(frozen=True)
class MetricCurves:
    """One metric of all runs at the steps that are drawn. NaN: that run has no value at that step."""

    name: str
    compared: bool  # False: a metric of the layout itself, like speed and memory
    total_steps: int
    steps: Integers
    values: Sequence[Floats | None]  # per run
    differences: Sequence[Floats | None]  # per run, relative; 0 is equal to the bit; None for a baseline
    floor: Floats | None = None  # the noise floor
    floor_kind: str = ""  # measured or estimated, and from what
    worst: Worst | None = None


@dataclass(frozen=True)
class ConfigRow:
    key: str
    values: list[str]  # per run
    differs: bool
    must_not: bool  # runs that differ here cannot be compared


@dataclass(frozen=True)
class Payload:
    title: str
    made: str
    version: str
    verdict: Banner
    runs: list[RunCard]
    metrics: list[MetricCurves]
    config: list[ConfigRow]
    notes: list[str] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)  # settings that must not differ, and do
    watch_seconds: float | None = None  # the page reloads itself this often


def render(payload: Payload) -> str:
    """Return the whole page as text."""
    uplot = f"/*! uPlot {UPLOT_VERSION}\n\n{asset('uPlot.LICENSE.txt')}*/\n{asset('uPlot.iife.min.js')}"
    parts = "\n".join(asset(f"report/{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n\n{parts}}})();\n'  # in a scope of their own
    style = f"{asset('uPlot.min.css')}\n{asset('base.css')}\n{asset('report.css')}"
    title, headline = (html.escape(utf8(text)) for text in (payload.title, payload.verdict.headline))
    head = plain_json.dumps(_plain(_head(payload)), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":  # which could end its script element
        head = head.replace(sign, f"\\u{ord(sign):04x}")
    return Template(asset("report.html")).substitute(
        title=title, headline=headline, policy=content_policy((uplot, script), style), style=style, uplot=uplot,
        script=script, head=head, blocks="\n".join(_blocks(payload)),
    )  # fmt: skip


def asset(name: str, package: str = "rlexp.compare") -> str:
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def content_policy(scripts: Sequence[str], style: str) -> str:
    """Return a content security policy that loads nothing and runs only the scripts with these hashes."""
    hashes = " ".join(_hash(script) for script in scripts) or "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _head(payload: Payload) -> dict[str, Any]:
    """Return everything but the arrays, and which arrays there are."""
    count = len(payload.runs)
    assert all(len(row.values) == count for row in payload.config), "a configuration row has one value per run"
    runs = [asdict(replace(run, clock=None)) for run in payload.runs]
    own = {name: getattr(payload, name) for name in ("title", "made", "version", "notes", "forced")}
    return own | {
        "watch": payload.watch_seconds,
        "verdict": asdict(payload.verdict),
        "runs": [{name: value for name, value in run.items() if name != "clock"} for run in runs],
        "metrics": [_metric_head(metric, count) for metric in payload.metrics],
        "config": [asdict(row) for row in payload.config],
    }


def _metric_head(metric: MetricCurves, runs: int) -> dict[str, Any]:
    assert len(metric.values) == len(metric.differences) == runs, f"{metric.name}: one curve per run, or None"
    return {
        "name": metric.name,
        "compared": metric.compared,
        "total": metric.total_steps,
        "drawn": len(metric.steps),
        "floor": metric.floor is not None,
        "floor_kind": metric.floor_kind,
        "values": [curve is not None for curve in metric.values],
        "differences": [curve is not None for curve in metric.differences],
        "worst": None if metric.worst is None else asdict(metric.worst),
    }


def _plain(value: Any) -> Any:
    """Turn numpy scalars into Python's, and numbers that are not finite into None."""
    match value:
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case np.generic():
            return _plain(value.item())
        case float() if not math.isfinite(value):
            return None
        case str():
            return utf8(value)
    return value


def utf8(text: str) -> str:
    """Replace lone surrogates, which no file can hold. Python reads bytes of a path that are not UTF-8 as such."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _blocks(payload: Payload) -> list[str]:
    blocks = [_block(f"metric-{number}", _metric_bytes(metric)) for number, metric in enumerate(payload.metrics)]
    for number, run in enumerate(payload.runs):
        if run.clock is not None and len(run.clock.steps):
            blocks.append(_block(f"clock-{number}", _clock_bytes(run.clock)))
    return blocks


def _block(name: str, data: bytes) -> str:
    return f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode("ascii")}</script>'


def _metric_bytes(metric: MetricCurves) -> bytes:
    """Return steps as int32; then the floor, values and differences that exist as float32, in the order of the runs."""
    curves = [metric.floor, *metric.values, *metric.differences]
    assert all(curve is None or len(curve) == len(metric.steps) for curve in curves), f"{metric.name}: a value per step"
    return np.asarray(metric.steps).astype("<i4").tobytes() + b"".join(_narrow(c) for c in curves if c is not None)


def _clock_bytes(clock: Knots) -> bytes:
    """Return steps, tokens and seconds as float64 columns of one length."""
    columns = []
    for column in (clock.steps, clock.tokens, clock.seconds):
        assert len(column) in (0, len(clock.steps)), "a clock has as many tokens and seconds as steps, or none"
        columns.append(np.asarray(column, dtype="<f8") if len(column) else np.full(len(clock.steps), np.nan, "<f8"))
    return b"".join(column.tobytes() for column in columns)


def _narrow(curve: Floats) -> bytes:
    """Return float32, which has the seven digits shown. Only exact zeros become zero, which means equal to the bit."""
    wide = np.asarray(curve, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype("<f4")
    lost = (narrow == 0) & (wide != 0)
    narrow[lost] = np.copysign(np.finfo(np.float32).tiny, wide[lost])
    return narrow.tobytes()
