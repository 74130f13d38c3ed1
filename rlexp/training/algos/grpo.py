"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.clipped import ClippedRatio, by_group
from rlexp.training.algos.policy_loss import Outcomes
from rlexp.training.algos.whiten import centred

EPS = 1e-4  # added to a group's deviation, as TRL does


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedRatio):
    """Advantage: (score − mean) / (deviation + 1e-4), within the answers to one prompt; the deviation is unbiased.

    With policy = old and loss.normalize=sequence, the policy's term is minus the mean advantage, which is 0 when the
    train batch holds whole groups. Two answers that score 0 and 1 have the advantages ∓0.7070.
    """

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, standardized)


def standardized(values: Tensor) -> Tensor:
    distances = centred(values)
    deviation = (distances.square().sum() / max(1, len(values) - 1)).sqrt()
    return distances / (deviation + EPS)
