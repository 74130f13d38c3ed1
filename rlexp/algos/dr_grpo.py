"""Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.algos.clipped import ClippedRatio, by_group
from rlexp.algos.policy import Outcomes
from rlexp.algos.whiten import centred


@dataclass(frozen=True, kw_only=True)
class DrGRPO(ClippedRatio):
    """score − mean within the answers to a prompt: GRPO without the deviation, which favours prompts whose answers
    score nearly alike; and with loss.normalize=fixed without an answer's own length, which favours long wrong ones.

    With policy = old the gradient is that of REINFORCE with the group's mean as its baseline, over the number of
    answers and rollout.max_new_tokens. Two answers that score 0 and 1 have ∓½.
    """

    groups: ClassVar[bool] = True

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, centred)
