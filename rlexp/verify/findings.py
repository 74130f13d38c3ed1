"""The first difference between a run and the reference, its clue, and the tolerances it is found with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from rlexp.verify.records import Array

DATA, LOGPS, LOSS = "data", "log-probabilities", "loss"
REWARDS, ADVANTAGES = "rewards", "advantages"  # of samples that the policy generates
GRADIENT, OPTIMIZER, METRICS = "gradient", "optimizer", "metrics"


class Clue(Enum):
    """The comparison that found a difference; `naming.py` derives the module from it."""

    PAIRS = "the data set"
    SAMPLES = "the sampler's batch"
    DRAWN = "the generated samples"
    REWARD = "their rewards"
    SCORED = "what the scoring pass keeps of them"
    BEHAVIOUR = "the log-probabilities with which they were generated"
    OUTCOMES = "what credit is computed from"
    CREDIT = "the credit, given that"
    SPREAD = "the advantages, given that"
    WEIGHED = "whitened advantages and weights in the loss"
    EXECUTED = "the samples that the step took"
    TOKENS = "an example's tokens"
    DEALT = "the units that the replicas are given"
    PACK = "the pack"
    SHARD = "the shards"
    PLACED = "the places that each rank holds"
    START = "the weights at the start"
    DTYPE = "the precision of the computing weights"
    STALE = "the weights that compute"
    POLICY = "the policy's log-probabilities"
    REFERENCE = "the reference model's log-probabilities"
    OTHERS = "the log-probabilities of mismatched answers"
    OF_TOKENS = "log Σ p², entropy or hits of the policy's distributions"
    SUMS = "sums of log-probabilities"
    COUNTS = "what the loss is given besides the sums"
    LOSSES = "losses, given the sums"
    SLOPES = "the losses' derivatives, given the sums"
    TAKEN = "losses, given what the formula returned"
    HANDED = "the loss handed to the engine"
    CHAIN = "the derivatives that reach the tokens"
    TRAINED = "which parameters are trained"
    GRADIENT = "the gradient"
    PARTS = "the gradient, given its parts"
    RANKS = "the ranks among themselves"
    RATE = "the learning rate"
    NORM = "the gradient's norm"
    WEIGHTS = "the weights after the step"
    VALUES = "values per example, given the sums"
    LOGITS = "mean logits"
    REDUCED = "a metric, given its parts"
    POSITION = "a metric that follows from the step"
    ABSENT = "a metric that is missing"


@dataclass(frozen=True)
class Finding:
    """The first difference. `got` is the run's value, `expected` the reference's."""

    step: int
    stage: str
    clue: Clue
    quantity: str
    got: str
    expected: str
    note: str = ""
    module: str = ""  # where the finding itself knows it


@dataclass(frozen=True)
class Allowed:
    """The largest differences that rounding explains. docs/measured/verify.md says where the numbers come from."""

    logp: float  # of a token, relative to max(1, |logp|)
    loss: float  # relative to the loss
    loss_of_sums: float  # added to it: relative to what the sums' own sizes would move (`stages/loss.py`)
    gradient: float  # ‖a − b‖ / ‖a‖ of a parameter; see `shares`
    weights: float  # largest difference relative to the largest weight of the parameter
    given: float  # values that follow by float64 arithmetic from the run's earlier values
    norm: float  # the gradient's norm, given the gradient
    updated: tuple[float, float]  # the weights, given the gradient: relative to the step, and to the weights
    metric: tuple[float, float]  # relative to the value and so much more: one that is only rounding weighs little
    # The rest is for samples that the policy draws; see docs/measured/verify.md.
    loss_of_samples: float  # relative to the size of its terms, which may cancel
    formula: float  # what the formula of a policy loss makes of given tokens, in the run's own numbers
    kept: float  # values that are kept for each token, in the run's own numbers


FLOAT64 = Allowed(
    logp=1e-11,
    loss=1e-12,
    loss_of_sums=1e-14,
    gradient=1e-11,
    weights=1e-12,
    given=1e-12,
    norm=1e-12,
    updated=(1e-9, 1e-15),
    metric=(1e-9, 0.01),
    loss_of_samples=1e-12,
    formula=1e-12,
    kept=1e-12,
)


@dataclass
class Gauge:
    """The largest difference of each quantity so far."""

    largest: dict[str, float] = field(default_factory=dict)

    def exceeds(self, quantity: str, difference: float, allowed: float) -> bool:
        """Note a difference and say whether it is more than allowed; NaN always is."""
        known = difference if math.isfinite(difference) else math.inf
        self.largest[quantity] = max(known, self.largest.get(quantity, 0.0))
        return not difference <= allowed


def worst_element(got: Array, wanted: Array) -> tuple[str, str]:
    """Both values, in words, where they differ most."""
    if got.shape != wanted.shape:
        return f"shape {got.shape}", f"shape {wanted.shape}"
    place = int(np.nanargmax(np.where(np.isfinite(got), np.abs(got - wanted), np.inf)))
    return shown(float(got.reshape(-1)[place])), shown(float(wanted.reshape(-1)[place]))


def shown(value: Any) -> str:
    return f"{float(value):.12g}" if isinstance(value, float | np.floating) else str(value)


def whole_factor(got: float, wanted: float) -> str:
    """Name a factor that is nearly a whole number or its inverse, since it often names the mistake."""
    if not wanted or not math.isfinite(got) or got / wanted <= 0:
        return ""
    factor = got / wanted
    for number, words in ((factor, "{:.0f} times too large"), (1 / factor, "a {:.0f}th of it")):
        if number > 1.5 and abs(number - round(number)) < 1e-6 * number:
            return "; " + words.format(number)
    return ""


@dataclass
class Failure:
    """The first difference, and the module whose code it points to."""

    precision: str
    step: int
    stage: str
    quantity: str
    got: str
    expected: str
    module: str
    note: str = ""
    evidence: str = ""
