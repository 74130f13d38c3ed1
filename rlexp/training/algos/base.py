"""Input and output of a loss on given answers. Shape letter: E examples.

A loss says what is `wanted`, and whoever calls it provides that. Its loss for a batch is the mean of `losses_E` over
the examples of the train batch; no mean is taken here. A term that is an average over tokens is divided by
`mean_tokens`, which is known before the first micro-batch, and becomes such a mean too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rlexp.training.types import Wanted

Sides = Mapping[str, Tensor]  # by the name of an answer (chosen, rejected; or answer): a value of each example, (E,)


@dataclass(frozen=True)
class Values:
    """What is known of some examples, in float64: all of a train batch, or those of a micro-batch."""

    logps: Sides  # log-probabilities of the answer's trained tokens, summed; empty where there are scores
    reference: Sides | None  # the same under the reference model
    tokens: Sides  # the number of these tokens
    of_tokens: Mapping[str, Sides] = field(default_factory=dict)  # sums over them, detached: by names of `Wanted`
    margin_E: Tensor | None = None  # of the rows
    mean_tokens: float = 1.0  # trained tokens of an example's first answer, averaged over the train batch
    carried: Mapping[str, float] = field(default_factory=dict)  # what the loss left behind at the step before
    held_out: bool = False  # nothing is learned from these examples
    label_E: Tensor | None = None  # of the rows: 1 for a good answer, 0 for a bad one
    mismatched_B: Tensor | None = None  # log π − log π_ref of answers to other prompts: all that the train batch has
    scores: Sides | None = None  # a reward model's, of whole answers

    @property
    def judged(self) -> Sides:
        """What the model says of each answer, through which the gradient passes."""
        return self.logps if self.scores is None else self.scores


@dataclass(frozen=True)
class Losses:
    """A loss for each example, and the metrics to log for it, detached."""

    losses_E: Tensor
    metrics_E: Mapping[str, Tensor]
    # The weight of each example in the mean of a metric; where none is given, it is 1. That of the loss is its share of
    # the loss's denominator.
    weights_E: Mapping[str, Tensor] = field(default_factory=dict)
    carried: Mapping[str, float] = field(default_factory=dict)  # outlives the step: numbers, the same on every rank
    # metrics of the whole batch that are the mean of one metric less that of another
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class Loss(Protocol):
    @property
    def wanted(self) -> Wanted: ...

    def __call__(self, values: Values) -> Losses: ...
