"""Whether the curves are one curve, in words; and the first place where they are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlexp.compare.difference import (
    EARLY,
    LOSSES,
    MARGIN,
    ROUNDING,
    Column,
    Difference,
    Steps,
    compared,
    difference,
    estimated_floor,
    measured_floor,
    within_rounding,
)
from rlexp.compare.families import Families, Family
from rlexp.compare.runs import CompareError, Run

AGREE, APART, UNPROVEN, NONE = "agree", "apart", "unproven", "none"


@dataclass(frozen=True)
class Floor:
    """How far rounding carries a metric, by step."""

    values: Column
    kind: str
    measured: bool


@dataclass(frozen=True)
class Judgement:
    """A run held against its baseline."""

    run: Run
    baseline: Run
    status: str
    worst: float  # relative, of the losses
    metric: str
    step: int | None  # the worst's, or the first that is apart
    words: str


@dataclass(frozen=True)
class Verdict:
    status: str
    headline: str
    judgements: list[Judgement]

    @property
    def details(self) -> list[str]:
        return [each.words for each in self.judgements]


def coarsest(runs: Sequence[Run]) -> str:
    return max((run.precision for run in runs), key=lambda precision: ROUNDING.get(precision, 1.0))


def between(run: Run, baseline: Run, metric: str) -> Difference:
    return difference(run.steps, run.column(metric), baseline.steps, baseline.column(metric))


def floor_of(family: Family, metric: str, steps: Steps) -> Floor:
    """Measured by runs of the family that differ from its baseline in their micro-batch or packing alone; else what was
    measured elsewhere."""
    baseline = family.baseline
    assert baseline is not None
    noise = [run for run in family.others() if _is_noise(run, baseline)]
    names = LOSSES if metric in LOSSES else (metric,)  # the two losses together: of the held-out one there are few
    measured = measured_floor([between(run, baseline, name) for run in noise for name in names], steps)
    if measured is not None:
        return Floor(measured, f"measured: {', '.join(run.label for run in noise)}", True)
    precision = coarsest(family.runs)
    estimate = estimated_floor(metric, precision, steps)
    return Floor(estimate, f"estimated: {precision} rounding of a small model, growing with the steps", False)


def _is_noise(run: Run, baseline: Run) -> bool:
    """The same layout, with another micro-batch or packing."""
    same = all(run.sizes.get(key) == baseline.sizes.get(key) for key in ("world_size", "ring_size"))
    precision = run.precision == baseline.precision
    engine = run.config.get("engine") == baseline.config.get("engine")
    layout = run.config.get("parallel") == baseline.config.get("parallel")
    micro = run.sizes.get("micro_batch_size") != baseline.sizes.get("micro_batch_size")
    packing = run.config.get("data", {}).get("packing") != baseline.config.get("data", {}).get("packing")
    return bool(run.sizes) and same and precision and engine and layout and (micro or packing)


def judge(families: Families) -> Verdict:
    judgements = [
        _judge_run(run, family)
        for family in families.families
        for run in family.others()
        if family.baseline is not None and len(run.steps)
    ]
    if not judgements:
        return Verdict(NONE, "There is nothing to compare: each run is an experiment of its own.", [])
    status = next((s for s in (APART, UNPROVEN, NONE) if any(each.status == s for each in judgements)), AGREE)
    return Verdict(status, _headline(status, judgements, families), judgements)


def _headline(status: str, judgements: Sequence[Judgement], families: Families) -> str:
    worst = max(judgements, key=lambda each: each.worst)
    baselines = {id(each.baseline) for each in judgements}
    curves = "one curve" if len(baselines) == 1 else f"{len(baselines)} curves, one of each experiment"
    lonely = [family.runs[0].label for family in families.families if len(family.runs) == 1]
    alone = f" Alone with its experiment: {', '.join(lonely)}." if lonely else ""
    match status:
        case "agree":
            return (
                f"The {len(judgements) + len(baselines)} runs draw {curves}: the loss differs by at most "
                f"{worst.worst:.1e}, which is rounding.{alone}"
            )
        case "apart":
            first = min((e for e in judgements if e.status == APART), key=lambda each: each.step or 0)
            return f"The curves part. {first.words}"
        case "unproven":
            return f"The loss differs by up to {worst.worst:.1e}, more than rounding was measured to do at first."
    return "The runs have no step in common."


def _judge_run(run: Run, family: Family) -> Judgement:
    """By its losses; in float64 by every metric that a layout must not move."""
    baseline = family.baseline
    assert baseline is not None
    precision = coarsest([run, baseline])
    precise = precision == "fp64"
    names = [name for name in run.columns if name in baseline.columns and compared(name)]
    gaps = {name: between(run, baseline, name) for name in names if precise or name in LOSSES}
    shared = max((len(gap.steps) for gap in gaps.values()), default=0)
    if not shared:
        words = f"{run.label} has no step in common with {baseline.label}."
        return Judgement(run, baseline, NONE, 0.0, "", None, words)
    worst_name = max((name for name in gaps if name in LOSSES), key=lambda name: _size(gaps[name]), default=names[0])
    worst = gaps[worst_name].worst() or (0, 0.0)
    found = [part for name, gap in gaps.items() if (part := _parts(name, gap, family, precision)) is not None]
    if not found:
        words = f"{run.label} is {baseline.label}'s curve at all {shared} steps: {_within(worst[1])}."
        return Judgement(run, baseline, AGREE, worst[1], worst_name, worst[0], words)
    step, name, ours, theirs, measured = min(found, key=lambda part: part[0])
    surely = measured or precise or step <= EARLY
    words = (
        f"{run.label} parts from {baseline.label} at step {step}: {name} is {ours:.9g}, and {theirs:.9g} there."
        if surely
        else f"{run.label} is {_size(gaps[name]):.1e} from {baseline.label} in {name}, more than estimated from step "
        f"{step} on. Whether that is rounding, a run with another train.micro_batch_size tells."
    )
    return Judgement(run, baseline, APART if surely else UNPROVEN, worst[1], name, step, words)


def _within(size: float) -> str:
    return "equal to the bit" if size == 0 else f"within {size:.1e}"


def _size(gap: Difference) -> float:
    return float(gap.relative.max(initial=0.0))


def _parts(name: str, gap: Difference, family: Family, precision: str) -> tuple[int, str, float, float, bool] | None:
    """The first step at which a metric is further off than rounding, with both values."""
    floor = floor_of(family, name, gap.steps)
    limit = within_rounding(name, precision, gap.steps)
    if floor.measured:  # of a few steps it may be zero to the bit
        limit = np.maximum(MARGIN * floor.values, limit if precision == "fp64" else limit / MARGIN)
    place = gap.first_above(limit)
    if place is None:
        return None
    return int(gap.steps[place]), name, float(gap.ours[place]), float(gap.baseline[place]), floor.measured


def first_above(families: Families, limit: float, patterns: Sequence[str]) -> str | None:
    """For `--fail-above`: the first step, metric and pair of runs further apart than that."""
    found: list[tuple[int, str]] = []
    judged = False
    for family in families.families:
        for run in family.others():
            assert family.baseline is not None
            for name in run.columns:
                if not compared(name) or not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                    continue
                gap = between(run, family.baseline, name)
                judged |= bool(len(gap.steps))
                place = gap.first_above(limit)
                if place is not None:
                    pair = f"{run.name} ({run.label}) and {float(gap.baseline[place])!r} in {family.baseline.name}"
                    words = (
                        f"step {gap.steps[place]}: {name} is {float(gap.ours[place])!r} in {pair} "
                        f"({family.baseline.label}), {gap.relative[place]:.1e} apart, more than {limit:g}"
                    )
                    found.append((int(gap.steps[place]), words))
    if not judged:
        raise CompareError(
            f"--fail-above {limit:g}: nothing was compared: no two runs have a step of {' or '.join(patterns)} in "
            f"common."
        )
    return min(found)[1] if found else None
