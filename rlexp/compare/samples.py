"""Whether two runs drew the same samples, and the first sample that differs.

Where probabilities differ by rounding, a run now and then draws a token that the other run did not draw, and from there
on its curve is another one. In float32 and bfloat16 that is no defect: curves are compared up to that sample. In
float64 it hardly ever happens, so a differing sample counts as a defect. Other prompts count as a defect in every
precision, since rounding does not choose prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.compare.runs import LoggedRun
from rlexp.run_files.curve_distance import ROUNDING
from rlexp.run_files.rollouts_jsonl import Apart


def coarsest(runs: Sequence[LoggedRun]) -> str:
    return max((run.precision for run in runs), key=lambda precision: ROUNDING.get(precision, 1.0))


def apart(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return the first rollout that differs; None where, as far as is known, the runs' samples are the same."""
    if run.record is None or other.record is None:
        return None
    return run.record.apart(other.record)


def excused(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return where rounding may have changed a sample. From there on the two runs are not compared."""
    first = apart(run, other)
    return first if first is not None and first.token is not None and coarsest([run, other]) != "fp64" else None


def inexcusable(run: LoggedRun, other: LoggedRun) -> Apart | None:
    """Return the first difference in the samples, if rounding does not explain it."""
    first = apart(run, other)
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
