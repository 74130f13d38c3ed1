"""Whether curves agree, and if not, where they part first and what that says: in words.

Where probabilities differ by rounding, a run now and then draws a token that the other run did not draw, and from there
on its curve is another one. In float32 and bfloat16 that is no defect: curves are compared up to that sample. In
float64 it hardly ever happens, so a differing sample counts as a defect. Other prompts count as a defect in every
precision, since rounding does not choose prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlexp.compare.families import Families, Family
from rlexp.compare.runs import LoggedRun
from rlexp.run_files import curve_distance
from rlexp.run_files.curve_distance import EARLY, LOSSES, MARGIN, ROUNDING, Column, Difference, Steps, within_rounding
from rlexp.run_files.rollouts_jsonl import Apart

MICRO = ("micro_batch_size", "max_tokens_per_micro_batch")  # sizes that move no curve beyond rounding
AGREE, APART, UNPROVEN, NONE = "agree", "apart", "unproven", "none"


def coarsest(runs: Sequence[LoggedRun]) -> str:
    return max((run.precision for run in runs), key=lambda precision: ROUNDING.get(precision, 1.0))


def first_apart(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return the first rollout that differs; None where, as far as is known, the runs' samples are the same."""
    if run.record is None or other.record is None:
        return None
    return run.record.apart(other.record)


def excused(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return where rounding may have changed a sample. From there on the two runs are not compared."""
    first = first_apart(run, other)
    return first if first is not None and first.token is not None and coarsest([run, other]) != "fp64" else None


def inexcusable(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return the first difference in the samples, if rounding does not explain it."""
    first = first_apart(run, other)
    return first if first is not None and excused(run, other) is None else None


def remark(first: Apart) -> str:
    return (
        f"the same samples up to step {first.step - 1}; {first.words}: rounding may flip a token, and the curves are "
        f"compared up to there"
    )


def named(first: Apart) -> str:
    """Describe a difference that rounding does not explain."""
    if first.token is None:
        return f"{first.words}, which rounding does not choose"
    return f"{first.words}, and in float64 rounding hardly ever flips a token"


@dataclass(frozen=True)
class Floor:
    """How far rounding moves a metric, by step."""

    values: Column
    kind: str
    measured: npt.NDArray[np.bool_]  # by step; elsewhere it is estimated


@dataclass(frozen=True)
class Divergence:
    """The first step at which two curves are further apart than rounding moves them."""

    step: int
    metric: str
    ours: float
    theirs: float
    measured: bool  # whether the noise floor at that step is measured, not estimated


@dataclass(frozen=True)
class Agreement:
    """A run compared with its baseline."""

    run: LoggedRun
    baseline: LoggedRun
    status: str
    worst: float  # relative, over the losses
    metric: str
    step: int | None  # the step of the worst difference, or the first step that is apart
    words: str
    excused: Apart | None = None  # where rounding may have changed a sample: the runs are compared up to there


@dataclass(frozen=True)
class Conclusion:
    """The result of the whole comparison."""

    status: str
    headline: str
    agreements: list[Agreement]

    @property
    def details(self) -> list[str]:
        return [each.words for each in self.agreements]


def between(run: LoggedRun, baseline: LoggedRun, metric: str) -> Difference:
    """Compare one metric of two runs, up to the first sample that rounding may have changed."""
    flipped = excused(run, baseline)
    upto, least = None if flipped is None else flipped.step - 1, curve_distance.least_size(metric, run.columns)
    return curve_distance.difference(
        run.steps, run.column(metric), baseline.steps, baseline.column(metric), upto=upto, least=least
    )


def floor_of(family: Family, metric: str, steps: Steps) -> Floor:
    """Return the noise floor, measured where possible, else estimated.

    Runs that differ from the baseline in their micro-batch or packing alone measure it. Noise larger than any rounding
    does not count.
    """
    baseline, precision = family.baseline, coarsest(family.runs)
    estimate = curve_distance.estimated_floor(metric, precision, steps)
    noise = [run for run in family.others() if is_noise(run, baseline)]
    names = LOSSES if metric in LOSSES else (metric,)  # both losses together: the held-out loss has few values
    measured = curve_distance.measured_floor([between(run, baseline, name) for run in noise for name in names], steps)
    if measured is None:
        nowhere = np.zeros(len(steps), dtype=np.bool_)
        return Floor(estimate, f"estimated: {precision} rounding of a small model, growing with the steps", nowhere)
    known = ~np.isnan(measured)
    values = np.where(known, np.minimum(measured, within_rounding(metric, precision, steps)), estimate)
    return Floor(values, f"measured: {', '.join(run.label for run in noise)}", known)


def is_noise(run: LoggedRun, baseline: LoggedRun) -> bool:
    """Whether a run has its baseline's layout, with another micro-batch or packing."""

    def of(each: LoggedRun, *sizes: str) -> list[Any]:
        return [each.sizes.get(key) for key in sizes]

    same = of(run, "world_size", "ring_size") == of(baseline, "world_size", "ring_size")
    same &= run.precision == baseline.precision
    same &= all(run.config.get(group) == baseline.config.get(group) for group in ("engine", "parallel"))
    packing = run.settings_of("data").get("packing") != baseline.settings_of("data").get("packing")
    return bool(run.sizes) and same and (packing or of(run, *MICRO) != of(baseline, *MICRO))


def outcome_of(families: Families) -> Conclusion:
    """Compare every run with the baseline of its family."""
    compared_runs = [(run, family) for family in families.families for run in family.others()]
    agreements = [agreement_of(run, family) for run, family in compared_runs if len(run.steps)]
    if not agreements:
        return Conclusion(NONE, "There is nothing to compare: each run is an experiment of its own.", [])
    status = next((s for s in (APART, UNPROVEN, NONE) if any(each.status == s for each in agreements)), AGREE)
    return Conclusion(status, _headline(status, agreements, families), agreements)


def taken(run: LoggedRun) -> int:
    """Count the steps of a run's rows; the row of step 0 is of none."""
    return int(np.count_nonzero(run.steps))


def _headline(status: str, agreements: Sequence[Agreement], families: Families) -> str:
    worst = max(agreements, key=lambda each: each.worst)
    baselines = {id(each.baseline) for each in agreements}
    curves = "one curve" if len(baselines) == 1 else f"{len(baselines)} curves, one per experiment"
    lonely = [family.runs[0].label for family in families.families if len(family.runs) == 1]
    besides = f" The only run of its experiment: {', '.join(lonely)}." if lonely else ""
    partly = [each.run.label for each in agreements if taken(each.run) != taken(each.baseline)]
    besides += f" Shorter or longer than its baseline: {', '.join(partly)}." if partly else ""
    besides += _samples(agreements)
    apart = "equal to the bit" if worst.worst == 0 else f"at most {worst.worst:.1e} apart, which is rounding"
    match status:
        case "agree":
            upto = " up to the first sample that differs" if any(each.excused for each in agreements) else ""
            count = len(agreements) + len(baselines)
            return f"The {count} runs draw {curves}{upto}: their losses are {apart}.{besides}"
        case "apart":
            first = min((e for e in agreements if e.status == APART), key=lambda each: each.step or 0)
            return f"The curves diverge. {first.words}"
        case "unproven":
            return f"The losses differ by up to {worst.worst:.1e}, more than the estimate for rounding.{besides}"
    nothing = next((each.words for each in agreements if each.status == NONE and each.excused), None)
    return nothing or "The runs have no step in common."


def _samples(agreements: Sequence[Agreement]) -> str:
    """Name the earliest run whose samples differ from its baseline's, and count the others."""
    flipped = [(each.run, each.excused) for each in agreements if each.excused is not None]
    if not flipped:
        return ""
    run, first = min(flipped, key=lambda each: each[1].step)
    more = f" {len(flipped) - 1} more differ from there on or later." if len(flipped) > 1 else ""
    return f" {run.label} has {remark(first)}.{more}"


def agreement_of(run: LoggedRun, family: Family) -> Agreement:
    """Compare a run's losses with its baseline's; in float64, every metric that a layout must not move."""
    baseline, precision = family.baseline, coarsest([run, family.baseline])
    precise = precision == "fp64"
    names = [name for name in run.columns if name in baseline.columns and curve_distance.compared(name)]
    gaps = {name: between(run, baseline, name) for name in names if precise or name in LOSSES}
    shared = max((len(gap.steps) for gap in gaps.values()), default=0)
    flipped, other = excused(run, baseline), inexcusable(run, baseline)
    samples = f" They have {remark(flipped)}." if flipped else f" And {named(other)}." if other else ""
    if not shared:
        words = f"{run.label} has no step in common with {baseline.label}."
        if flipped is not None and len(np.intersect1d(run.steps, baseline.steps)):
            words = f"{run.label} and {baseline.label} have nothing left to compare: {flipped.words}."
        return Agreement(run, baseline, NONE, 0.0, "", None, words, flipped)
    worst_name = max((name for name in gaps if name in LOSSES), key=lambda name: _size(gaps[name]), default=names[0])
    worst = gaps[worst_name].worst() or (0, 0.0)
    candidates = [_divergence(run, name, gap, family, precision) for name, gap in gaps.items()]
    first = min((each for each in candidates if each is not None), key=lambda each: each.step, default=None)
    if other is not None and (first is None or other.step <= first.step):
        words = f"{run.label} diverges from {baseline.label} at step {other.step}: {named(other)}."
        return Agreement(run, baseline, APART, worst[1], worst_name, other.step, words)
    if first is None:
        most, size = max(len(run.steps), len(baseline.steps)), worst[1]
        where = f"at all {shared} steps" if shared == most else f"at the {shared} steps they share, of {most}"
        where = where if flipped is None else f"at the {shared} steps compared"
        within = "equal to the bit" if size == 0 else f"within {size:.1e}"
        words = f"{run.label} has the curve of {baseline.label} {where}: {within}.{samples}"
        return Agreement(run, baseline, AGREE, worst[1], worst_name, worst[0], words, flipped)
    step, name = first.step, first.metric
    surely = first.measured or precise or step <= EARLY
    words = (
        f"{run.label} diverges from {baseline.label} at step {step}: {name} is {first.ours:.9g}, the "
        f"baseline's {first.theirs:.9g}."
        if surely
        else f"{run.label} differs from {baseline.label} by {_size(gaps[name]):.1e} in {name}, from step {step} on "
        f"more than the estimate. To learn whether that is rounding, add a run with another train.micro_batch_size."
    )
    return Agreement(run, baseline, APART if surely else UNPROVEN, worst[1], name, step, words + samples, flipped)


def _size(gap: Difference) -> float:
    return float(gap.relative.max(initial=0.0))


def _divergence(run: LoggedRun, name: str, gap: Difference, family: Family, precision: str) -> Divergence | None:
    """Return where a metric first differs by more than rounding.

    A run that measures the noise is not compared with its own noise. Float64 has no noise but the promised tolerance.
    """
    floor = floor_of(family, name, gap.steps)
    limit = within_rounding(name, precision, gap.steps)
    held = floor.measured & (precision != "fp64" and not is_noise(run, family.baseline))
    # A floor measured over a few steps may be exactly zero.
    limit = np.where(held, np.maximum(MARGIN * floor.values, limit / MARGIN), limit)
    place = gap.first_above(limit)
    if place is None:
        return None
    values = float(gap.ours[place]), float(gap.baseline[place])
    return Divergence(int(gap.steps[place]), name, *values, bool(held[place]))
