"""What a preference loss takes and gives. Shape letter: P pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities of the answers of each pair."""

    chosen_P: Tensor
    rejected_P: Tensor


@dataclass(frozen=True)
class PairLosses:
    """A loss per pair, and what else is worth logging of each pair. The step divides their sums by the number of
    pairs of the train batch: no mean is taken here."""

    losses_P: Tensor
    metrics_P: dict[str, Tensor]


class PreferenceLoss(Protocol):
    @property
    def needs_reference(self) -> bool: ...

    def __call__(self, policy: PairLogps, reference: PairLogps | None) -> PairLosses: ...
