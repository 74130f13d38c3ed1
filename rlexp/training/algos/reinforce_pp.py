"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.clipped import ClippedRatio
from rlexp.training.algos.gae import returns_to_go
from rlexp.training.algos.policy_loss import Outcomes, Spread


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(ClippedRatio):
    """Advantage of a token: the score, less the price of its own and all later tokens' divergence.

    There is no critic and no group: loss.whiten makes the mean of the train batch the baseline. With policy = old,
    loss.whiten and loss.normalize=token, the policy's term is 0 and its gradient is that of REINFORCE.
    """

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:  # noqa: ARG002
        return outcomes.scores_N

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> Spread:  # noqa: ARG002
        return Spread(returns_to_go(self.rewards(credit, kl_L, kl_coef)))
