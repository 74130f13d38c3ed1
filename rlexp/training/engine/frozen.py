"""Weights that nothing trains: those of a reference model, and of an evaluation.

They are in the dtype that computes, without gradients, masters and moments. Where the engine of that name keeps pieces,
each rank has its piece; otherwise each rank has all of them. There is no critic among them: it only trains a policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlexp.training.engine.base import Fragment, Named, shape_of, trained
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.policy import CRITIC, Policy
from rlexp.training.types import Shard, TokenLogps


class Frozen(Named):
    """Whole weights on every rank. `module` runs them: the policy itself, or what gathers its pieces."""

    steps = 0  # of the checkpoint that was loaded
    leaves: tuple[str, ...] = (CRITIC,)

    def __init__(self, name: str, policy: Policy) -> None:
        self.name, self.policy = name, policy
        self.module: Any = policy
        self.parameters = trained(policy)  # those that a checkpoint has
        policy.eval().requires_grad_(False)

    def forward(self, shard: Shard) -> TokenLogps:
        logps: TokenLogps = self.module(shard)
        return logps

    @torch.no_grad()
    def decode(self, batch: Decoding) -> Tensor:
        logits_BV: Tensor = self.module(batch)
        return logits_BV

    def weights(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.named():
            if name in self.parameters or not trained:
                yield name, parameter.detach()

    def fragments(self) -> list[Fragment]:
        return [Fragment(name, 0, parameter.detach().view(-1), {}) for name, parameter in self.parameters.items()]

    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape_of(parameter) for name, parameter in self.parameters.items()}

    def restored(self, steps: int) -> None:
        self.steps = steps

    def _nothing_trains(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("frozen weights have no gradient and no optimizer")

    backward = grad_norm = step = gradients = _nothing_trains
