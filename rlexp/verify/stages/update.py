"""The gradient, and the optimizer's step with it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rlexp.verify.compared import ComparedStep
from rlexp.verify.findings import GRADIENT, OPTIMIZER, Clue, Finding, whole_factor, worst_element
from rlexp.verify.norms import common_factor, shares, size_of


def gradient(step: ComparedStep) -> Iterator[Finding]:
    """Check the gradient of each parameter."""
    ran, meant = step.whole.ran, step.whole.meant
    names, wanted = ran.names("gradient", step.number), meant.names("gradient", step.number)
    there = {True: "is trained", False: "is frozen"}
    for name in sorted(set(names) ^ set(wanted)):
        yield step.finding(GRADIENT, Clue.TRAINED, name, there[name in names], there[name in wanted])
    sizes = [size_of(*step.both("gradient", name), name) for name in wanted if name in names]
    apart = shares(sizes)
    largest = max(apart, key=lambda share: math.inf if math.isnan(share) else share)
    whole = math.sqrt(sum(size.wanted**2 for size in sizes)) or 1.0
    step.whole.gauge.exceeds("gradient, whole", math.sqrt(sum(size.apart**2 for size in sizes)) / whole, math.inf)
    bound = max(step.whole.allowed.gradient * step.drift, step.slack)
    if step.whole.gauge.exceeds("gradient of a parameter", largest, bound):
        wrong = [size for size, share in zip(sizes, apart, strict=True) if not share <= bound]
        worst = sizes[apart.index(largest)]
        note = f"{len(wrong)} of {len(sizes)} parameters differ" + common_factor(wrong)
        what = f"{worst.name} (‖difference‖ / ‖gradient‖ = {worst.apart / (worst.wanted or 1.0):.2g}), norm"
        yield step.finding(GRADIENT, Clue.GRADIENT, what, worst.got, worst.wanted, note)
    yield from _ranks_agree(step, "gradient", GRADIENT)


def _ranks_agree(step: ComparedStep, kind: str, stage: str) -> Iterator[Finding]:
    first, *others = (getattr(seen, f"{kind}_marks") for seen in step.seen)
    for trace, marks in zip(step.whole.traces[1:], others, strict=True):
        for name in first:
            if marks.get(name) != first[name]:
                what = f"{name} on rank {trace.rank}"
                yield step.finding(stage, Clue.RANKS, what, "another value", "what rank 0 has, to the bit")
                return


def optimizer(step: ComparedStep) -> Iterator[Finding]:
    allowed = step.whole.allowed
    for name in ("lr", "train/learning_rate"):
        got = step.seen[0].lr if name == "lr" else step.seen[0].row.get(name, math.nan)
        if step.first_wrong("learning rate", np.array([got]), np.array([step.expected.lr]), 1e-300) is not None:
            yield step.finding(OPTIMIZER, Clue.RATE, "learning rate", got, step.expected.lr)
    own = math.sqrt(sum(float((np.asarray(step.whole.ran.read("gradient", step.number, n), np.float64) ** 2).sum())
                        for n in step.whole.ran.names("gradient", step.number)))  # fmt: skip
    got = step.seen[0].row.get("train/grad_norm", math.nan)
    if step.whole.gauge.exceeds("norm, given the gradient", abs(got - own) / (own or 1.0), allowed.norm):
        yield step.finding(OPTIMIZER, Clue.NORM, "norm of the gradient", got, own, whole_factor(got, own).lstrip("; "))
    yield from _weights(step)
    yield from _ranks_agree(step, "weight", OPTIMIZER)


def _weights(step: ComparedStep) -> Iterator[Finding]:
    """Check the weights given the run's own gradient, which is exact. The difference to the reference's weights is only
    measured: where a gradient is nothing but rounding, Adam's division by its size makes a large difference of it."""
    given = step.whole.given_weights[step.place]
    ran, meant, allowed = step.whole.ran, step.whole.meant, step.whole.allowed
    if missing := set(meant.names("weights", step.number)) - set(ran.names("weights", step.number)):
        yield step.finding(OPTIMIZER, Clue.WEIGHTS, sorted(missing)[0], "no weights: no step was taken", "a step")
        return
    of_step, of_weight = allowed.updated
    wrong = {}
    for name, update in given.items():
        bound = of_step * update.step + of_weight * update.weight
        step.whole.gauge.exceeds("weights, given the gradient", update.apart / (update.weight or 1.0), math.inf)
        if not update.apart <= bound:
            wrong[name] = update.apart / (bound or 1e-300)
    step.whole.gauge.exceeds("weights after the step", step.apart, allowed.weights)
    if wrong:
        name = max(wrong, key=lambda each: wrong[each])
        got, wanted = worst_element(*step.both("weights", name))
        note = f"{len(wrong)} of {len(given)} parameters differ"
        yield step.finding(OPTIMIZER, Clue.WEIGHTS, f"{name}, its worst element", got, wanted, note)
