"""Whether the curves are one curve, in words; and the first place where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlexp.compare.difference import (
    EARLY,
    LOSSES,
    MARGIN,
    Column,
    Difference,
    Steps,
    compared,
    difference,
    estimated_floor,
    least_size,
    measured_floor,
    within_rounding,
)
from rlexp.compare.families import Families, Family
from rlexp.compare.runs import Run
from rlexp.compare.samples import Apart, coarsest, excused, inexcusable, named, remark

AGREE, APART, UNPROVEN, NONE = "agree", "apart", "unproven", "none"


@dataclass(frozen=True)
class Floor:
    """How far rounding carries a metric, by step."""

    values: Column
    kind: str
    measured: npt.NDArray[np.bool_]  # by step; elsewhere it is estimated


@dataclass(frozen=True)
class Parting:
    """The first step at which two curves are further apart than rounding; by a floor that was measured, or not."""

    step: int
    metric: str
    ours: float
    theirs: float
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
    excused: Apart | None = None  # where rounding may have drawn other samples: it is compared up to there


@dataclass(frozen=True)
class Verdict:
    status: str
    headline: str
    judgements: list[Judgement]

    @property
    def details(self) -> list[str]:
        return [each.words for each in self.judgements]


def between(run: Run, baseline: Run, metric: str) -> Difference:
    """Up to the first sample that rounding may have changed; what follows is another curve's."""
    flipped = excused(run, baseline)
    return difference(
        run.steps,
        run.column(metric),
        baseline.steps,
        baseline.column(metric),
        upto=None if flipped is None else flipped.step - 1,
        least=least_size(metric, run.columns),
    )


def floor_of(family: Family, metric: str, steps: Steps) -> Floor:
    """Measured by runs of the family that differ from its baseline in their micro-batch or packing alone; else what was
    measured elsewhere. Noise that is itself beyond what rounding can be measures nothing."""
    baseline = family.baseline
    assert baseline is not None
    precision = coarsest(family.runs)
    estimate = estimated_floor(metric, precision, steps)
    noise = [run for run in family.others() if is_noise(run, baseline)]
    names = LOSSES if metric in LOSSES else (metric,)  # the two losses together: of the held-out one there are few
    measured = measured_floor([between(run, baseline, name) for run in noise for name in names], steps)
    if measured is None:
        nowhere = np.zeros(len(steps), dtype=np.bool_)
        return Floor(estimate, f"estimated: {precision} rounding of a small model, growing with the steps", nowhere)
    known = ~np.isnan(measured)
    values = np.where(known, np.minimum(measured, within_rounding(metric, precision, steps)), estimate)
    return Floor(values, f"measured: {', '.join(run.label for run in noise)}", known)


def is_noise(run: Run, baseline: Run) -> bool:
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
    partly = [each.run.label for each in judgements if len(each.run.steps) != len(each.baseline.steps)]
    alone += f" Not of one length with its baseline: {', '.join(partly)}." if partly else ""
    alone += _samples(judgements)
    apart = "equal to the bit" if worst.worst == 0 else f"at most {worst.worst:.1e} apart, which is rounding"
    match status:
        case "agree":
            upto = " up to the first sample that differs" if any(each.excused for each in judgements) else ""
            return f"The {len(judgements) + len(baselines)} runs draw {curves}{upto}: their losses are {apart}.{alone}"
        case "apart":
            first = min((e for e in judgements if e.status == APART), key=lambda each: each.step or 0)
            return f"The curves part. {first.words}"
        case "unproven":
            return (
                f"The loss differs by up to {worst.worst:.1e}, more than rounding was measured to do at first.{alone}"
            )
    nothing = next((each.words for each in judgements if each.status == NONE and each.excused), None)
    return nothing or "The runs have no step in common."


def _samples(judgements: Sequence[Judgement]) -> str:
    """Whose samples differ, and from where on: the earliest, and how many more."""
    flipped = [(each.run, each.excused) for each in judgements if each.excused is not None]
    if not flipped:
        return ""
    run, first = min(flipped, key=lambda each: each[1].step)
    more = f" {len(flipped) - 1} more have others from there on or later." if len(flipped) > 1 else ""
    return f" {run.label} has {remark(first)}.{more}"


def _judge_run(run: Run, family: Family) -> Judgement:
    """By its losses; in float64 by every metric that a layout must not move."""
    baseline = family.baseline
    assert baseline is not None
    precision = coarsest([run, baseline])
    precise = precision == "fp64"
    names = [name for name in run.columns if name in baseline.columns and compared(name)]
    gaps = {name: between(run, baseline, name) for name in names if precise or name in LOSSES}
    shared = max((len(gap.steps) for gap in gaps.values()), default=0)
    flipped, other = excused(run, baseline), inexcusable(run, baseline)
    said = f" They have {remark(flipped)}." if flipped else f" And {named(other)}." if other else ""
    if not shared:
        words = f"{run.label} has no step in common with {baseline.label}."
        if flipped is not None and len(np.intersect1d(run.steps, baseline.steps)):
            words = f"Nothing is left to compare of {run.label} and {baseline.label}: {flipped.words}."
        return Judgement(run, baseline, NONE, 0.0, "", None, words, flipped)
    worst_name = max((name for name in gaps if name in LOSSES), key=lambda name: _size(gaps[name]), default=names[0])
    worst = gaps[worst_name].worst() or (0, 0.0)
    found = [part for name, gap in gaps.items() if (part := _parts(run, name, gap, family, precision)) is not None]
    first = min(found, key=lambda part: part.step, default=None)
    if other is not None and (first is None or other.step <= first.step):
        words = f"{run.label} parts from {baseline.label} at step {other.step}: {named(other)}."
        return Judgement(run, baseline, APART, worst[1], worst_name, other.step, words)
    if first is None:
        where = _where(run, baseline, shared) if flipped is None else f"at the {shared} steps compared"
        words = f"{run.label} is {baseline.label}'s curve {where}: {_within(worst[1])}.{said}"
        return Judgement(run, baseline, AGREE, worst[1], worst_name, worst[0], words, flipped)
    step, name = first.step, first.metric
    surely = first.measured or precise or step <= EARLY
    words = (
        f"{run.label} parts from {baseline.label} at step {step}: {name} is {first.ours:.9g}, and {first.theirs:.9g} "
        f"there."
        if surely
        else f"{run.label} is {_size(gaps[name]):.1e} from {baseline.label} in {name}, more than estimated from step "
        f"{step} on. Whether that is rounding, a run with another train.micro_batch_size tells."
    )
    status = APART if surely else UNPROVEN
    return Judgement(run, baseline, status, worst[1], name, step, words + said, flipped)


def _where(run: Run, baseline: Run, shared: int) -> str:
    """Of runs that are not whole, how much of the curve was seen."""
    most = max(len(run.steps), len(baseline.steps))
    return f"at all {shared} steps" if shared == most else f"at the {shared} steps they share, of {most}"


def _within(size: float) -> str:
    return "equal to the bit" if size == 0 else f"within {size:.1e}"


def _size(gap: Difference) -> float:
    return float(gap.relative.max(initial=0.0))


def _parts(run: Run, name: str, gap: Difference, family: Family, precision: str) -> Parting | None:
    """Where a metric is further off than rounding for the first time. What measures the noise is not
    held against itself; and float64 has no other noise than what is promised."""
    assert family.baseline is not None
    floor = floor_of(family, name, gap.steps)
    limit = within_rounding(name, precision, gap.steps)
    held = floor.measured & (precision != "fp64" and not is_noise(run, family.baseline))
    # A floor of a few steps may be zero to the bit.
    limit = np.where(held, np.maximum(MARGIN * floor.values, limit / MARGIN), limit)
    place = gap.first_above(limit)
    if place is None:
        return None
    return Parting(int(gap.steps[place]), name, float(gap.ours[place]), float(gap.baseline[place]), bool(held[place]))
