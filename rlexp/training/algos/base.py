"""Input and output of a preference loss. Shape letter: P pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities of each pair's two answers."""

    chosen_P: Tensor
    rejected_P: Tensor


@dataclass(frozen=True)
class PairLosses:
    """A loss for each pair, and the metrics to log for it. No mean is taken here: the step divides the sums by the
    number of pairs in the train batch."""

    losses_P: Tensor
    metrics_P: dict[str, Tensor]


class PreferenceLoss(Protocol):
    @property
    def needs_reference(self) -> bool: ...

    def __call__(self, policy: PairLogps, reference: PairLogps | None) -> PairLosses: ...
