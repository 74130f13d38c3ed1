"""`--fail-above`: whether any two runs of one experiment are further apart, and whether all could be compared."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlexp.compare.divergence import between, excused, inexcusable, named, remark
from rlexp.compare.families import Families, Family
from rlexp.compare.runs import CompareError, LoggedRun
from rlexp.run_files.curve_distance import LOSSES, Column, Steps, compared, least_size, on_steps, relative


@dataclass(frozen=True)
class Excess:
    step: int
    words: str


def first_above(
    families: Families, runs: Sequence[LoggedRun], limit: float, patterns: Sequence[str] | None
) -> str | None:
    """Name the first step, metric and pair of runs above the limit, or what could not be compared; None: it passes."""
    for run in runs:
        if not len(run.steps) and run.status != "skipped":
            return f"{run.name} ({run.label}) has no step: it is {run.status}{f', {run.reason}' if run.reason else ''}"
    several = [family for family in families.families if len(family.runs) > 1]
    names = chosen(several, patterns)
    if not names:
        what = " or ".join(patterns or LOSSES)
        raise CompareError(f"--fail-above {limit:g}: nothing was compared: no two runs of one experiment have {what}.")
    excesses = [excess for family in several for excess in _samples(family, names)]
    excesses += [excess for family in several for name in names for excess in _excesses(family, name, limit)]
    return min(excesses, key=lambda excess: excess.step).words if excesses else None


def remarks(families: Families) -> list[str]:
    """Name, for each run, the earliest differing sample up to which it was compared with a run before it."""
    lines = []
    for family in families.families:
        for place, run in enumerate(family.runs):
            flipped = [(first, other) for other in family.runs[:place] if (first := excused(run, other)) is not None]
            if flipped:
                first, other = min(flipped, key=lambda each: each[0].step)
                lines.append(f"{run.name} ({run.label}) and {other.name} ({other.label}): {remark(first)}")
    return lines


def chosen(families: Sequence[Family], patterns: Sequence[str] | None) -> list[str]:
    """Return the metrics to compare. A pattern that fits no metric is an error."""
    known = {name for family in families for run in family.runs for name in run.columns if compared(name)}
    for pattern in patterns or ():
        if families and not fnmatch.filter(known, pattern):
            raise CompareError(
                f"--metrics {pattern}: fits no metric that can be compared. There are {', '.join(sorted(known))}."
            )
    return sorted(name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in patterns or LOSSES))


def _samples(family: Family, names: Sequence[str]) -> Iterator[Excess]:
    """Report samples that differ beyond rounding, and runs whose samples differ too early to compare anything."""
    for one, other in itertools.combinations(family.runs, 2):
        first = inexcusable(one, other)
        if first is not None:
            pair = f"{one.name} ({one.label}) and {other.name} ({other.label})"
            yield Excess(first.step, f"step {first.step}: {pair} have different samples: {named(first)}")
    for run in family.runs:
        others = [other for other in family.runs if other is not run]
        flipped = [first for other in others if (first := excused(run, other)) is not None]
        if flipped and not any(len(between(run, other, name).steps) for other in others for name in names):
            latest = max(flipped, key=lambda first: first.step)
            yield Excess(
                latest.step,
                f"step {latest.step}: {run.name} ({run.label}) has nothing left to compare: {latest.words}, and "
                f"curves are compared up to the first sample that differs",
            )


def _excesses(family: Family, name: str, limit: float) -> Iterator[Excess]:
    """Report where any two runs of a family exceed the limit, or where a run lacks a value."""
    steps = np.unique(np.concatenate([run.steps[~np.isnan(run.column(name))] for run in family.runs]))
    values = np.stack([on_steps(run.steps, run.column(name), steps) for run in family.runs])
    missing = np.isnan(values)
    if missing.any():
        place = int(missing.any(axis=0).argmax())
        number = int(missing[:, place].argmax())
        run, count = family.runs[number], int(missing[number].sum())
        yield Excess(
            int(steps[place]),
            f"step {steps[place]}: {run.name} ({run.label}) has no {name}, while others do: {count} of {len(steps)} "
            f"steps cannot be compared",
        )
    pairs = list(itertools.combinations(family.runs, 2))
    if any(excused(one, other) is not None for one, other in pairs):
        for one, other in pairs:  # up to the first sample that differs
            gap = between(one, other, name)
            if (at := gap.first_above(limit)) is not None:
                ends = float(gap.ours[at]), float(gap.baseline[at])
                yield _excess(int(gap.steps[at]), name, (one, other), ends, float(gap.relative[at]), limit)
    else:
        whole = ~missing.any(axis=0)
        yield from _excess_of_all(family.runs, name, limit, steps[whole], values[:, whole])


def _excess_of_all(
    runs: Sequence[LoggedRun], name: str, limit: float, steps: Steps, values: Column
) -> Iterator[Excess]:
    """Compare all runs at once; `values` has the shape runs × steps."""
    if not len(steps):
        return
    high, low = values.max(axis=0), values.min(axis=0)
    apart = relative(high - low, values[0], high, low, least=least_size(name, runs[0].columns))
    beyond = np.flatnonzero(~(apart <= limit))
    if len(beyond):
        place = int(beyond[0])
        one, other = (runs[int(pick(values[:, place]))] for pick in (np.argmax, np.argmin))
        ends = float(high[place]), float(low[place])
        yield _excess(int(steps[place]), name, (one, other), ends, float(apart[place]), limit)


def _excess(
    step: int, name: str, pair: tuple[LoggedRun, LoggedRun], values: tuple[float, float], apart: float, limit: float
) -> Excess:
    ends = [f"{value!r} in {run.name} ({run.label})" for run, value in zip(pair, values, strict=True)]
    return Excess(step, f"step {step}: {name} is {' and '.join(ends)}, {apart:.1e} apart, more than {limit:g}")
