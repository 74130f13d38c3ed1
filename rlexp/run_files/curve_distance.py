"""How far two curves lie apart, and how far rounding may move them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

# Metrics of the layout itself (speed, memory, traffic), which may differ between layouts. No other metric may.
OWN = (
    *("train/ring_tokens", "train/shared_tokens", "train/ring_bytes", "train/step_seconds", "train/tokens_per_second"),
    *("train/tflops", "train/mfu", "train/grad_acc", "train/micro_batches", "memory/", "parity/", "train/time/"),
    *(
        "train/samples_per_second",
        "train/ring_balance",
        "train/ring_width",
        "train/ring_estimate",
        "train/replica_skew",
        "train/replica_wait_seconds",
    ),
)
LOSS_TOLERANCE = 1e-12  # relative, for loss and weights in float64; measured: docs/measured/invariance.md
METRIC_TOLERANCE = (1e-9, 1e-11)  # relative and absolute, for the other metrics in float64
LOSSES = ("train/loss", "eval/loss")
SCORE = "train/objective/scores"  # of runs that draw their own samples, in the row of each rollout's first step
# Relative rounding, measured over 10 steps of model=tiny and every layout: docs/measured/invariance.md. Other metrics
# are differences of large numbers, and lie up to fifty times further apart.
ROUNDING = {"fp64": 2.6e-14, "fp32": 4.0e-7, "bf16": 3.3e-3}
OTHERS = 50.0
MARGIN = 10.0  # times the noise floor: two roundings of one curve are no further apart
LEAST = 1e-3  # times a metric's root mean square: the smallest size that a difference is divided by
SAMPLED = "train/policy/"  # metrics of runs that draw their own samples, and of no others
EARLY = 100  # steps within which rounding cannot have grown beyond what was measured


def compared(name: str) -> bool:
    return name != "step" and not name.startswith(OWN)


def least_size(metric: str, names: Iterable[str]) -> float:
    """Return the smallest size that a metric's difference is divided by, in a run that has metrics of these names.

    A policy's loss is a mean of advantages of size one, which cancel. In the first step on a rollout they cancel
    wholly, and the loss is nothing but rounding. The other metrics of such a run begin at zero too: for them the least
    size keeps the absolute tolerance of float64.
    """
    if not any(name.startswith(SAMPLED) for name in names):
        return 0.0
    return 1.0 if metric in LOSSES else METRIC_TOLERANCE[1] / METRIC_TOLERANCE[0]


@dataclass(frozen=True)
class Difference:
    """The difference between two runs in one metric, at the steps that both have."""

    steps: Steps
    relative: Column
    ours: Column
    baseline: Column

    def worst(self) -> tuple[int, float] | None:
        """Return the step and size of the largest difference."""
        if not len(self.steps):
            return None
        place = int(self.relative.argmax())
        return int(self.steps[place]), float(self.relative[place])

    def first_above(self, limit: float | Column) -> int | None:
        """Return the place of the first difference above a limit. The limit may be one number or one for each step."""
        beyond = np.flatnonzero(~(self.relative <= limit))
        return int(beyond[0]) if len(beyond) else None


def difference(
    steps: Steps, ours: Column, other_steps: Steps, other: Column, *, upto: int | None = None, least: float = 0.0
) -> Difference:
    """Compare two curves at the steps where both have a value, up to step `upto`."""
    common, own, theirs = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
    a, b = ours[own], other[theirs]
    present = ~(np.isnan(a) | np.isnan(b)) & (True if upto is None else common <= upto)
    common, a, b = common[present], a[present], b[present]
    return Difference(common.astype(np.int64), relative(np.abs(a - b), b, a, least=least), a, b)


def relative(gap: Column, reference: Column, *others: Column, least: float = 0.0) -> Column:
    """Divide gaps by the larger of the values, but by no less than a thousandth of the metric's root mean square.

    A metric that changes its sign passes near zero again and again: its gaps are divided by the whole root mean square.
    """
    scale = np.max(np.abs(np.stack([reference, *others])), axis=0)
    if len(reference):
        size = np.sqrt(np.mean(reference * reference))
        scale = np.maximum(scale, size if reference.min() < 0 < reference.max() else size * LEAST)
        scale = np.maximum(scale, least)
    return np.divide(gap, scale, out=np.zeros_like(gap), where=gap > 0)


def on_steps(own: Steps, values: Column, steps: Steps) -> Column:
    """Return a run's values at other steps, NaN where it has none."""
    placed = np.full(len(steps), np.nan)
    _, here, places = np.intersect1d(own, steps, assume_unique=True, return_indices=True)
    placed[places] = values[here]
    return placed


def estimated_floor(metric: str, precision: str, steps: Steps) -> Column:
    """Estimate, for each step, how far rounding moves a metric: ROUNDING, growing with the steps."""
    size = ROUNDING.get(precision, ROUNDING["bf16"]) * (1.0 if metric in LOSSES else OTHERS)
    return np.asarray(size * np.maximum(1.0, steps / 10), dtype=np.float64)


def within_rounding(metric: str, precision: str, steps: Steps) -> Column:
    """Estimate how far apart two roundings of one curve may be. In float64 it is at least the promised tolerance."""
    limit = MARGIN * estimated_floor(metric, precision, steps)
    if precision == "fp64":
        limit = np.maximum(limit, LOSS_TOLERANCE if metric in LOSSES else METRIC_TOLERANCE[0])
    return limit


def measured_floor(noise: list[Difference], steps: Steps) -> Column | None:
    """Return, for each step, the largest difference so far between runs that differ in their micro-batch alone.

    The first ten steps have one floor, since a single step may agree by chance. After the last measured step the floor
    is NaN.
    """
    noise = [each for each in noise if len(each.steps)]
    if not noise:
        return None
    floor = np.zeros(len(steps))
    for each in noise:
        so_far = np.maximum.accumulate(each.relative)
        so_far[:10] = so_far[:10].max()
        places = np.searchsorted(each.steps, steps, side="right") - 1
        floor = np.maximum(floor, np.where(places >= 0, so_far[np.maximum(places, 0)], 0.0))
    return np.where(steps <= max(each.steps[-1] for each in noise), floor, np.nan)
