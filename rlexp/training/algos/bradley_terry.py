"""Reward models: the Bradley-Terry loss of two answers' scores (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155).

With margins it is that of Llama 2 (Touvron et al. 2023, arXiv 2307.09288, equation 2). Centring is by Eisenstein et al.
2023 (arXiv 2312.09244). Shape letter: P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import accuracies
from rlexp.training.algos.logistic import logistic
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class BradleyTerry:
    """−log σ(chosen − rejected − margin) + center · (chosen + rejected)², of scores."""

    margin_weight: float = 1.0
    center: float = 0.0

    @property
    def wanted(self) -> Wanted:
        return Wanted(scores=True, margins=self.margin_weight > 0)

    def __call__(self, values: Values) -> Losses:
        assert values.scores is not None
        chosen_P, rejected_P = values.scores["chosen"], values.scores["rejected"]
        ahead_P = chosen_P - rejected_P
        asked_P = 0.0 if values.margin_E is None else self.margin_weight * values.margin_E
        losses_P = logistic(ahead_P - asked_P) + self.center * (chosen_P + rejected_P) ** 2
        metrics_P = {
            "rewards/chosen": chosen_P.detach(),
            "rewards/rejected": rejected_P.detach(),
            "rewards/accuracies": accuracies(ahead_P.detach(), (chosen_P.abs() + rejected_P.abs()).detach()),
            "rewards/margins": ahead_P.detach(),
        }
        return Losses(losses_P, metrics_P)
