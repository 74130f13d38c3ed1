"""Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.clipped import ClippedRatio, by_group
from rlexp.training.algos.policy_loss import Outcomes
from rlexp.training.algos.whiten import centred


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedRatio):
    """Advantage: score − mean, within the answers to one prompt.

    It leaves out two divisors of GRPO. The deviation favours prompts whose answers score nearly alike. An answer's own
    length favours long wrong answers; loss.normalize=fixed leaves it out. With policy = old the gradient is that of
    REINFORCE with the group's mean as baseline, divided by answers × rollout.max_new_tokens. Two answers that score 0
    and 1 have the advantages ∓½.
    """

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, centred)
