"""Interface of an engine that draws answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from rlexp.training.rollout.deal import Request
from rlexp.training.types import Sample

# Yields the policy's whole parameters one after the other, with their names; may be a collective call.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class Draws(Protocol):
    def renew(self, weights: Weights) -> None:
        """Take the policy's weights before a rollout, if the engine keeps a copy. All ranks call `weights`, or none."""

    def draw(self, micro_batches: Sequence[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """Yield the samples of all requests, those together that end together. Every rank must exhaust it."""
