"""Weights that nothing trains: those of a reference model, and of an evaluation.

They are in the dtype that computes, without gradients, masters and moments. Where the engine of that name keeps pieces,
each rank has its piece; otherwise each rank has all of them. There is no critic among them: it only trains a policy.
"""

from __future__ import annotations

from typing import Any

from rlexp.training.engine.base import Engine, Fragment, trained
from rlexp.training.model.policy import CRITIC, Policy


class Frozen(Engine):
    """Whole weights on every rank."""

    steps = 0  # of the checkpoint that was loaded
    leaves: tuple[str, ...] = (CRITIC,)

    def __init__(self, name: str, policy: Policy) -> None:
        self.name, self.policy = name, policy
        self.module: Any = policy
        self.parameters = trained(policy)
        policy.eval().requires_grad_(False)

    def fragments(self) -> list[Fragment]:
        return [Fragment(name, 0, parameter.detach().view(-1), {}) for name, parameter in self.parameters.items()]

    def restored(self, steps: int) -> None:
        self.steps = steps

    def _nothing_trains(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("frozen weights have no gradient and no optimizer")

    backward = grad_norm = step = gradients = _nothing_trains
