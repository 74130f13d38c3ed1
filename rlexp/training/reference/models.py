"""References that run a model: one of its own, or the policy as it was when training began."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.engine.base import Engine
from rlexp.training.engine.frozen import Frozen
from rlexp.training.reference.base import Reference
from rlexp.training.types import Shard


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
