"""Make the report from runs: what the page, the picture and the summary show."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlexp.base import files
from rlexp.base.version import __version__
from rlexp.compare import page
from rlexp.compare.divergence import Conclusion, between, first_apart, floor_of, outcome_of
from rlexp.compare.families import Families, Family
from rlexp.compare.runs import Group, LoggedRun, settings
from rlexp.config.identity import GROUPS
from rlexp.run_files import evaluations
from rlexp.run_files.curve_distance import SCORE, Column, Steps, compared, on_steps
from rlexp.run_files.evaluations import OF_LENGTH, by_length

DRAWN = 1000  # the most steps of a metric on the page; a longer curve is thinned out
KNOTS = 400  # of a run's clock
FROM_SWEEP = ("logger.run_name", "logger.group", "logger.axes", "logger.baseline")
IN_SUMMARY = (
    *("name", "label", "status", "reason", "baseline", "family", "path", "sizes", "steps", "last_loss"),
    *("last_score", "worst_difference", "compared_upto", "tokens_per_second", "step_seconds", "efficiency"),
    *("predicted_bytes", "peak_bytes", "peak_phase", "peak_rank", "tensors", "memory"),
)
FIRST = (*("train/loss", SCORE, "eval/loss", "train/rewards/margins", "train/rewards/accuracies", "train/grad_norm"),)


@dataclass
class Report:
    group: Group
    families: Families
    outcome: Conclusion

    @property
    def notes(self) -> list[str]:
        skipped = [
            f"{run.label} is {run.status}: {run.reason}"
            for run in self.group.runs
            if run.status in ("skipped", "failed") and run.reason
        ]
        sharing = [run for run in self.group.runs if run.shared_cores]
        if sharing and len(self.group.runs) > 1:
            counts = "–".join(map(str, sorted({run.cores for run in sharing if run.cores is not None})))
            labels = ", ".join(run.label for run in sharing)
            skipped.append(f"{labels}: more ranks than cores ({counts}). They took turns, so efficiency "
                           f"says nothing of GPUs.")  # fmt: skip
        own = [note for run in self.group.runs for note in run.notes]
        return [*self.group.notes, *self.families.notes, *skipped, *own]


def make(group: Group, families: Families) -> Report:
    return Report(group, families, outcome_of(families))


def write(report: Report, where: Path, *, watch_seconds: float | None = None) -> tuple[page.Payload, list[Path]]:
    """Write `report.html`, `curves.png` and `summary.json`, each in one step."""
    from rlexp.compare.picture import draw  # here, since matplotlib takes a second to import

    where.mkdir(parents=True, exist_ok=True)
    paths = [where / name for name in ("report.html", "curves.png", "summary.json")]
    payload = payload_of(report, watch_seconds)
    files.write_text(paths[0], page.render(payload))
    draw(report.group.runs, report.families, report.outcome.headline, paths[1])
    files.write_text(paths[2], json.dumps(summary(report, payload), indent=2, allow_nan=False) + "\n")
    return payload, paths


# ---- the page ----


def payload_of(report: Report, watch_seconds: float | None = None) -> page.Payload:
    runs = report.group.runs
    return page.Payload(
        title=report.group.title,
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        verdict=page.Banner(cast(Any, report.outcome.status), report.outcome.headline, report.outcome.details),
        runs=[card(run, report) for run in runs],
        metrics=[metric(name, report) for name in metric_names(runs)],
        config=config_rows(runs),
        notes=report.notes,
        forced=report.families.forced,
        watch_seconds=watch_seconds,
    )


def metric_names(runs: Sequence[LoggedRun]) -> list[str]:
    """Sort the metrics: losses first; then training, evaluation and the rest, each in the order of logging."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    families = list(dict.fromkeys(["train", "eval", *(name.partition("/")[0] for name in names)]))
    return sorted(names, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), families.index(n.split("/")[0])))


def card(run: LoggedRun, report: Report) -> page.RunCard:
    family = next((each for each in report.families.families if run in each.runs), None)
    agreement = next((each for each in report.outcome.agreements if each.run is run), None)
    baseline = family.baseline if family and family.others() else None  # a single run has no baseline
    peak = highest_peak(run)
    return page.RunCard(
        name=run.name,
        label=run.label,
        status=cast(Any, run.status),
        reason=run.reason or "",
        baseline=run is baseline,
        family=report.families.families.index(family) if family else 0,
        baseline_label=baseline.label if baseline is not None and baseline is not run else None,
        path=str(run.path or ""),
        sizes=run.sizes,
        steps=int(run.steps[-1]) if len(run.steps) else 0,
        last_loss=last(run, "train/loss"),
        last_score=last(run, SCORE),
        held_out=evaluations.in_words({name: last(run, name) for name in evaluations.SHOWN}),
        worst_difference=agreement.worst if agreement and agreement.metric else None,
        compared_upto=agreement.excused.step - 1 if agreement and agreement.excused else None,
        tokens_per_second=speed(run),
        step_seconds=step_seconds(run),
        efficiency=efficiency(run, baseline),
        memory=[page.RankMemory(each["rank"], each["peaks"], each.get("tensors", {}))
                for each in run.memory if each["peaks"]],
        peak_bytes=peak.bytes if peak else None,
        peak_rank=peak.rank if peak else None,
        peak_phase=peak.phase if peak else None,
        tensors=highest_peak(run, "tensors_"),
        predicted_bytes=run.predicted,
        lengths=lengths(run),
        deal=run.deal,
        clock=clock(run),
    )  # fmt: skip


def lengths(run: LoggedRun) -> list[page.LengthPart]:
    """Return the held-out rows by length, at the last evaluation."""
    values = {name: value for name in run.columns if OF_LENGTH.fullmatch(name)
              and (value := last(run, name)) is not None}  # fmt: skip
    return [
        page.LengthPart(name, int(part.get("examples", 0)), **{
            leaf: part.get(leaf) for leaf in ("loss", "accuracy", "accuracy_low", "accuracy_high")
        })
        for name, part in by_length(values).items()
    ]  # fmt: skip


def last(run: LoggedRun, name: str) -> float | None:
    values = run.column(name)
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else None


def highest_peak(run: LoggedRun, of: str = "") -> page.HighestPeak | None:
    """Return the highest peak of all steps, with the phase and rank of its step: of memory, or `tensors_`."""
    peaks = run.column(f"memory/{of}peak_bytes")
    peaks = np.where(np.isfinite(peaks), peaks, np.nan)
    if np.isnan(peaks).all():
        return None
    place = int(np.nanargmax(peaks))
    peak_name = re.compile(rf"memory/([a-z]+)_{of}peak_bytes")
    phases = [match.group(1) for name in run.columns if (match := peak_name.fullmatch(name))]
    phase = next((p for p in phases if run.column(f"memory/{p}_{of}peak_bytes")[place] == peaks[place]), None)
    rank = run.column(f"memory/{of}peak_rank")[place]
    return page.HighestPeak(int(peaks[place]), int(rank) if np.isfinite(rank) else None, phase)


def _steady(run: LoggedRun, name: str) -> Column:
    """Return a metric without the first step, which allocates buffers and chooses kernels."""
    values = run.column(name)[run.steps > 0]  # the row of step 0 has held-out values alone
    values = values[1:] if len(values) > 1 else values
    return values[~np.isnan(values)]


def step_seconds(run: LoggedRun) -> float | None:
    seconds = _steady(run, "train/step_seconds")
    return float(np.median(seconds)) if len(seconds) else None


def speed(run: LoggedRun) -> float | None:
    tokens, seconds = _steady(run, "train/tokens").sum(), _steady(run, "train/step_seconds").sum()
    return float(tokens / seconds) if seconds > 0 and tokens > 0 else None


def efficiency(run: LoggedRun, baseline: LoggedRun | None) -> float | None:
    """Return tokens per second and rank, divided by the baseline's."""
    if baseline is None or "world_size" not in run.sizes or "world_size" not in baseline.sizes:
        return None
    ours, theirs = speed(run), speed(baseline)
    if ours is None or theirs is None:
        return None
    return ours / run.sizes["world_size"] / (theirs / baseline.sizes["world_size"])


def clock(run: LoggedRun) -> page.Knots | None:
    """Return the tokens and seconds of training up to some steps."""
    if not len(run.steps):
        return None
    knots = np.unique(np.linspace(0, len(run.steps) - 1, min(KNOTS, len(run.steps))).astype(int))
    seconds = np.cumsum(np.nan_to_num(run.column("train/step_seconds")))
    tokens = run.column("train/total_tokens")
    if np.isnan(tokens).all():
        tokens = np.cumsum(np.nan_to_num(run.column("train/tokens")))
    return page.Knots(run.steps[knots], tokens[knots], seconds[knots])


def metric(name: str, report: Report) -> page.MetricCurves:
    runs = report.group.runs
    steps = np.unique(np.concatenate([run.steps[~np.isnan(run.column(name))] for run in runs]))
    values = [on_steps(run.steps, run.column(name), steps) for run in runs]
    gaps: list[Column | None] = [None] * len(runs)
    worst: page.Worst | None = None
    floor, kind = None, ""
    for family in report.families.families if compared(name) else ():
        if name not in family.baseline.columns:
            continue
        for place, run in enumerate(runs):
            if run not in family.others() or name not in run.columns:
                continue
            gap = between(run, family.baseline, name)
            gaps[place] = on_steps(gap.steps, gap.relative, steps)
            largest = gap.worst()
            if largest is not None and (worst is None or largest[1] > worst.value):
                worst = page.Worst(place, *largest)
        if floor is None and family.others():
            known = floor_of(family, name, steps)
            floor, kind = known.values, known.kind
    kept = telling(steps, [v for v in values if v is not None], [g for g in gaps if g is not None])
    drawn = [value[kept] if not np.isnan(value).all() else None for value in values]
    differences = [None if gap is None else gap[kept] for gap in gaps]
    floor = None if floor is None else floor[kept]
    return page.MetricCurves(name, compared(name), len(steps), steps[kept], drawn, differences, floor, kind, worst)


def telling(steps: Steps, values: Sequence[Column], gaps: Sequence[Column]) -> Steps:
    """Return the places to draw: all, or three of each stretch of a long curve.

    The three are the first step, the step at which the runs lie furthest apart, and the step at which a curve is most
    extreme. Every drawn point is one that was logged.
    """
    count = len(steps)
    if count <= DRAWN:
        return np.arange(count)
    stretches = DRAWN // 3
    bounds = np.linspace(0, count, stretches + 1).astype(int)
    apart = _largest(gaps, count)
    extreme = _largest([np.abs(value - _smooth(value, bounds)) for value in values], count)
    kept = {0, count - 1}
    for first, end in itertools.pairwise(bounds):
        kept |= {int(first), int(first + apart[first:end].argmax()), int(first + extreme[first:end].argmax())}
    return np.array(sorted(kept))


def _largest(columns: Sequence[Column], count: int) -> Column:
    largest = np.full(count, -1.0)
    for column in columns:
        np.fmax(largest, column, out=largest)
    return largest


def _smooth(value: Column, bounds: Steps) -> Column:
    """Replace each value by the mean of its stretch."""
    sums = np.add.reduceat(np.nan_to_num(value), bounds[:-1])
    return np.asarray(np.repeat(sums / np.diff(bounds), np.diff(bounds)), dtype=np.float64)


def config_rows(runs: Sequence[LoggedRun]) -> list[page.ConfigRow]:
    """Return a row per configuration key. Keys that a sweep fills in for its jobs are left out."""
    flat = [settings(run) or {f"sizes.{key}": str(value) for key, value in run.sizes.items()} for run in runs]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if not key.startswith(FROM_SWEEP)]
    rows, identity = [], {name for run in runs for name in run.identity}
    for key in keys:
        values = [each.get(key, "–") for each in flat]
        known = [value for value, run in zip(values, runs, strict=True) if run.config]
        fixed = key in identity or (not identity and key.partition(".")[0] in ("seed", *GROUPS))
        rows.append(page.ConfigRow(key, values, len(set(known)) > 1, fixed))
    return rows


# ---- summary.json ----


def summary(report: Report, payload: page.Payload) -> dict[str, Any]:
    outcome = report.outcome
    return {
        "title": payload.title,
        "made": payload.made,
        "version": payload.version,
        "verdict": {"status": outcome.status, "headline": outcome.headline, "details": outcome.details},
        "forced": payload.forced,
        "notes": payload.notes,
        "families": [family_summary(family) for family in report.families.families],
        "runs": [run_summary(run, known) for run, known in zip(report.group.runs, payload.runs, strict=True)],
    }


def family_summary(family: Family) -> dict[str, Any]:
    """Return each run's largest difference to the baseline, by metric, and its first differing sample."""
    apart: dict[str, dict[str, Any]] = {}
    drawn: dict[str, dict[str, Any] | None] = {}
    for run in family.others():
        apart[run.name] = {}
        for name in run.columns:
            if compared(name) and name in family.baseline.columns:
                worst = between(run, family.baseline, name).worst()
                apart[run.name][name] = None if worst is None else {"step": worst[0], "relative": worst[1]}
        other = first_apart(run, family.baseline)
        drawn[run.name] = None if other is None else asdict(other)
    return {
        "baseline": family.baseline.name,
        "runs": [run.name for run in family.runs],
        "largest_differences": apart,
        "first_differing_samples": drawn,
    }


def run_summary(run: LoggedRun, known: page.RunCard) -> dict[str, Any]:
    card = asdict(known)
    finite = {name: value for name in run.columns if (value := last(run, name)) is not None and math.isfinite(value)}
    return {key: card[key] for key in IN_SUMMARY} | {
        "last": finite,
        "precision": run.precision if run.config else None,
        "identity": run.identity,
    }
