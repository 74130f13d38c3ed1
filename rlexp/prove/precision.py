"""What rounding explains in float32 and bfloat16, and how far a run lies from the float64 reference beside its noise.

What follows by arithmetic from what a run had before (losses, sums, metrics, the optimizer's step) is exact in every
precision, and held so. Log-probabilities and gradients are not: they are held to a multiple of the unit roundoff that
was measured over layouts and models, or to a multiple of the noise floor, whichever is more. See docs/verify.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlexp.config.schema import Precision
from rlexp.prove.records import Array, Key, TensorFiles
from rlexp.prove.stages import (
    GRADIENT,
    LOGPS,
    LOSS,
    OPTIMIZER,
    Allowed,
    Clue,
    Comparison,
    Finding,
    Size,
    common_factor,
    size_of,
)

UNIT = {Precision.fp32: 2.0**-24, Precision.bf16: 2.0**-9}
LITTLE = 1e-6
OF_FLOOR = 10.0  # a run may lie this many times further from float64 than from itself with another micro-batch

# A token's, a parameter's: only what no rounding comes near is caught by these; the sums below are held tighter.
OWN = {
    precision: Allowed(
        logp=math.inf,
        loss=math.inf,
        loss_of_sums=0.0,
        gradient=math.inf,
        gradient_whole=0.0,
        weights=math.inf,
        given=1e-12,
        norm=1e-5,
        updated=(1e-3, 2.0**-23),  # the optimizer's are float32 in both
        metric=(math.inf, math.inf),
    )
    for precision in UNIT
}


@dataclass(frozen=True)
class Quantity:
    """A difference to the float64 reference, and how many units of roundoff it may be."""

    name: str
    stage: str
    clue: Clue
    units: float
    between: Callable[[Values, Values], float]


@dataclass(frozen=True)
class Measured:
    quantity: str
    own: float  # to the float64 reference
    floor: float  # to the same layout with another micro-batch
    allowed: float


@dataclass(frozen=True)
class Values:
    """What one step came to, in a run or in the reference."""

    number: int
    policy: Mapping[Key, Array]
    reference: Mapping[Key, Array]
    loss: float
    files: TensorFiles


def measure(run: Comparison, other: Comparison) -> tuple[list[Measured], Finding | None]:
    """The table of a run, and the first quantity in the order of the way that rounding does not explain."""
    unit = UNIT[run.cfg.train.precision]
    ours, others, meant = list(_steps(run)), list(_steps(other)), list(_meant(run))
    table: list[Measured] = []
    first: Finding | None = None
    for quantity in QUANTITIES:
        floor = max(quantity.between(a, b) for a, b in zip(others, ours, strict=True))
        allowed = max(quantity.units * unit, OF_FLOOR * floor)
        apart = [quantity.between(a, b) for a, b in zip(ours, meant, strict=True)]
        table.append(Measured(quantity.name, max(apart), floor, allowed))
        wrong = [step for step, value in zip(ours, apart, strict=True) if not value <= allowed]
        if wrong and first is None:
            number = wrong[0].number
            finding = Finding(number, quantity.stage, quantity.clue, quantity.name, f"{apart[number - 1]:.2g} from float64",
                              f"{allowed:.2g} at most", f"noise floor {floor:.2g}")  # fmt: skip
            first = _named(finding, ours[number - 1], meant[number - 1])
    return table, first


def _named(finding: Finding, got: Values, meant: Values) -> Finding:
    """With the parameter that is worst, where it is the gradient that differs."""
    if finding.stage != GRADIENT:
        return finding
    sizes = list(_sizes(got, meant))
    worst = max(sizes, key=lambda size: size.apart / (size.wanted or 1.0))
    note = f"{finding.note}; worst: {worst.name}, norm {worst.got:.6g} against {worst.wanted:.6g}"
    return replace(finding, note=note + common_factor(sizes))


def _steps(run: Comparison) -> Iterator[Values]:
    for step in run.steps():
        policy, reference = step.by_sequence("policy_t"), step.by_sequence("reference_t")
        yield Values(step.number, policy, reference, step.mean_loss(), run.ran)


def _meant(run: Comparison) -> Iterator[Values]:
    for step in run.expected.steps:
        yield Values(step.number, step.policy, step.reference, step.loss, run.meant)


def _sizes(a: Values, b: Values) -> Iterator[Size]:
    for name in b.files.names("gradient", b.number):
        yield size_of(a.files.read("gradient", a.number, name), b.files.read("gradient", b.number, name), name)


def of_tokens(a: Values, b: Values) -> float:
    """The largest difference of a token's log-probability, relative to max(1, |log-probability|)."""
    return max(
        float((np.abs(ours[key] - theirs[key]) / np.maximum(1.0, np.abs(theirs[key]))).max())
        for ours, theirs in ((a.policy, b.policy), (a.reference, b.reference))
        for key in theirs
    )


def of_pairs(a: Values, b: Values) -> float:
    """The largest difference of a sequence's sum, relative to it."""
    return max(
        abs(float(ours[key].sum() - theirs[key].sum())) / max(1.0, abs(float(theirs[key].sum())))
        for ours, theirs in ((a.policy, b.policy), (a.reference, b.reference))
        for key in theirs
    )


def of_loss(a: Values, b: Values) -> float:
    return abs(a.loss - b.loss) / (abs(b.loss) or 1.0)


def of_gradient(a: Values, b: Values) -> float:
    """‖a − b‖ / ‖b‖ of all parameters together."""
    sizes = list(_sizes(a, b))
    return math.sqrt(sum(s.apart**2 for s in sizes)) / (math.sqrt(sum(s.wanted**2 for s in sizes)) or 1.0)


def of_parameter(a: Values, b: Values) -> float:
    """The largest ‖a − b‖ / ‖b‖ of a parameter; one that is a millionth of the whole gradient is rounding anyway."""
    sizes = list(_sizes(a, b))
    whole = math.sqrt(sum(s.wanted**2 for s in sizes))
    return max(s.apart / (s.wanted + LITTLE * whole or 1.0) for s in sizes)


def of_weights(a: Values, b: Values) -> float:
    """The largest difference relative to the largest weight of the parameter."""
    found = 0.0
    for name in b.files.names("weights", b.number):
        ours, theirs = a.files.read("weights", a.number, name), b.files.read("weights", b.number, name)
        found = max(found, float(np.abs(ours - theirs).max()) / (float(np.abs(theirs).max()) or 1.0))
    return found


# In units of roundoff: what was measured over layouts and models, and a margin (docs/verify.md).
QUANTITIES = (
    Quantity("log-probability of a token", LOGPS, Clue.POLICY, 64.0, of_tokens),
    Quantity("log-probabilities per pair", LOGPS, Clue.POLICY, 16.0, of_pairs),
    Quantity("loss", LOSS, Clue.POLICY, 64.0, of_loss),
    Quantity("gradient", GRADIENT, Clue.GRADIENT, 64.0, of_gradient),
    Quantity("gradient of a parameter", GRADIENT, Clue.GRADIENT, 256.0, of_parameter),
    Quantity("weights after the step", OPTIMIZER, Clue.WEIGHTS, math.inf, of_weights),
)
