"""The interface of references: the log-probabilities that the policy's are compared with, for the sequences of a shard.
And those that run a model: one of its own, or the policy as it was when training began.

A reference that knows its numbers before training finds them by the names of a pack's sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.engine.base import Engine
from rlexp.training.engine.frozen import Frozen
from rlexp.training.types import Pack, Shard


class Reference(ABC):
    def known(self, pack: Pack, shard: Shard) -> Shard:  # noqa: ARG002
        """Return a shard of the host, with what is known of it before any model runs."""
        return shard

    @abstractmethod
    def logps(self, shard: Shard) -> Tensor:
        """Return each target's log-probability, (t,), without gradient. A collective call if weights are in pieces."""


@dataclass(frozen=True)
class OfModel(Reference):
    """A frozen model in memory."""

    frozen: Frozen

    @torch.no_grad()
    def logps(self, shard: Shard) -> Tensor:
        return self.frozen.forward(shard).logps_n


@dataclass(frozen=True)
class OfAdapter(Reference):
    """The policy without its adapter, or with the adapter that training began with: no second model."""

    engine: Engine

    @torch.no_grad()
    def logps(self, shard: Shard) -> Tensor:
        with self.engine.policy.starting():
            return self.engine.forward(shard).logps_n
