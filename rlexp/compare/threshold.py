"""`--fail-above`: whether any two runs of one experiment are further apart, and all was there to be compared."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlexp.compare.difference import LOSSES, compared, on_steps, relative
from rlexp.compare.families import Families, Family
from rlexp.compare.runs import CompareError, Run


@dataclass(frozen=True, order=True)
class Excess:
    step: int
    words: str


def first_above(families: Families, runs: Sequence[Run], limit: float, patterns: Sequence[str] | None) -> str | None:
    """The first step, metric and pair of runs; or what could not be compared, which is no pass either."""
    for run in runs:
        if not len(run.steps) and run.status != "skipped":
            return f"{run.name} ({run.label}) has no step: it is {run.status}{f', {run.reason}' if run.reason else ''}"
    several = [family for family in families.families if len(family.runs) > 1]
    names = chosen(several, patterns)
    if not names:
        what = " or ".join(patterns or LOSSES)
        raise CompareError(f"--fail-above {limit:g}: nothing was compared: no two runs of one experiment have {what}.")
    found = [excess for family in several for name in names for excess in _excesses(family, name, limit)]
    return min(found).words if found else None


def chosen(families: Sequence[Family], patterns: Sequence[str] | None) -> list[str]:
    """The metrics that are looked at. A pattern that was typed and fits none is a mistake."""
    known = {name for family in families for run in family.runs for name in run.columns if compared(name)}
    for pattern in patterns or ():
        if families and not fnmatch.filter(known, pattern):
            raise CompareError(
                f"--metrics {pattern}: fits no metric that a layout must not move. There are "
                f"{', '.join(sorted(known))}."
            )
    return sorted(name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in patterns or LOSSES))


def _excesses(family: Family, name: str, limit: float) -> Iterator[Excess]:
    """Of any two of its runs, not of each and the baseline alone."""
    steps = np.unique(np.concatenate([run.steps[~np.isnan(run.column(name))] for run in family.runs]))
    values = np.stack([on_steps(run.steps, run.column(name), steps) for run in family.runs])
    missing = np.isnan(values)
    if missing.any():
        place = int(missing.any(axis=0).argmax())
        number = int(missing[:, place].argmax())
        run, count = family.runs[number], int(missing[number].sum())
        yield Excess(
            int(steps[place]),
            f"step {steps[place]}: {run.name} ({run.label}) has no {name}, and others have: {count} of {len(steps)} "
            f"steps cannot be compared",
        )
        steps, values = steps[~missing.any(axis=0)], values[:, ~missing.any(axis=0)]
    if not len(steps):
        return
    high, low = values.max(axis=0), values.min(axis=0)
    apart = relative(high - low, values[0], high, low)
    beyond = np.flatnonzero(~(apart <= limit))
    if len(beyond):
        place = int(beyond[0])
        one, other = (family.runs[int(pick(values[:, place]))] for pick in (np.argmax, np.argmin))
        yield Excess(
            int(steps[place]),
            f"step {steps[place]}: {name} is {float(high[place])!r} in {one.name} ({one.label}) and "
            f"{float(low[place])!r} in {other.name} ({other.label}), {apart[place]:.1e} apart, more than {limit:g}",
        )
