"""What draws answers, by whatever means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from rlexp.rollout.deal import Request
from rlexp.types import Sample

Weights = Callable[[], Iterator[tuple[str, Tensor]]]  # the policy's, whole, one after the other; perhaps collective


class Draws(Protocol):
    def renew(self, weights: Weights) -> None:
        """Before each rollout: what has weights of its own takes these. All ranks, or none, call `weights`."""

    def draw(self, micro_batches: Sequence[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """The samples of each micro-batch, in the order of its requests. To be exhausted by every rank."""
