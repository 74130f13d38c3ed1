"""The family of losses over single answers, each labelled good or bad. Shape letters: E examples, B of the train batch.

A loss of the family compares an answer's reward, β·(log π − log π_ref), with a point of reference. Good answers should
be above it, bad ones below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import accuracies
from rlexp.training.types import Wanted

MARGINS = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}


@dataclass(frozen=True)
class Unpaired(ABC):
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    needs: ClassVar[Wanted] = Wanted(reference=True, labels=True)

    @property
    def wanted(self) -> Wanted:
        return self.needs

    @abstractmethod
    def losses(self, ahead_E: Tensor) -> Tensor:
        """Return the loss of each answer by how far its reward is on its label's side of the point, (E,)."""

    def point(self, values: Values) -> float:  # noqa: ARG002
        """Return the reward with which the answers' rewards are compared."""
        return 0.0

    def logged(self, point: float) -> Mapping[str, float]:  # noqa: ARG002
        """Return metrics of its own, the same for all answers."""
        return {}

    def carried(self, values: Values) -> Mapping[str, float]:  # noqa: ARG002
        """Return the numbers that the next step needs of this one."""
        return {}

    def __call__(self, values: Values) -> Losses:
        assert values.label_E is not None
        assert values.reference is not None
        logps_E, reference_E, good_E = values.logps["answer"], values.reference["answer"], values.label_E
        sign_E, point = 2 * good_E - 1, self.point(values)
        weight_E = self.desirable_weight * good_E + self.undesirable_weight * (1 - good_E)  # in their dtype, exactly
        rewards_E = self.beta * (logps_E - reference_E)
        losses_E = weight_E * self.losses(sign_E * (rewards_E - point))
        ahead_E, logps_E = (sign_E * (rewards_E - point)).detach(), logps_E.detach()
        metrics_E = {"rewards/accuracies": accuracies(ahead_E, self.beta * (logps_E.abs() + reference_E.abs()))}
        weights_E: dict[str, Tensor] = {}
        for side, of_side_E in (("chosen", good_E), ("rejected", 1 - good_E)):
            metrics_E |= {f"rewards/{side}": rewards_E.detach(), f"logps/{side}": logps_E}
            weights_E |= {f"rewards/{side}": of_side_E, f"logps/{side}": of_side_E}
        metrics_E |= {name: torch.full_like(logps_E, value) for name, value in self.logged(point).items()}
        return Losses(losses_E, metrics_E, weights_E, self.carried(values), MARGINS)
