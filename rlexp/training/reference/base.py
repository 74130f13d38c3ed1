"""The interface of references: the log-probabilities that the policy's are compared with, for the sequences of a shard.

A reference that knows its numbers before training finds them by the names of a pack's sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from rlexp.training.types import Pack, Shard


class Reference(ABC):
    def known(self, pack: Pack, shard: Shard) -> Shard:  # noqa: ARG002
        """Return a shard of the host, with what is known of it before any model runs."""
        return shard

    @abstractmethod
    def logps(self, shard: Shard) -> Tensor:
        """Return the log-probability of each of the shard's targets, (t,), without a gradient. A collective call where
        the reference's weights are in pieces."""
