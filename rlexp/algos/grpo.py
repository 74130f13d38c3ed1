"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.algos.clipped import ClippedRatio, by_group
from rlexp.algos.policy import Outcomes
from rlexp.algos.whiten import centred

EPS = 1e-4  # added to a group's deviation, as TRL does


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedRatio):
    """(score − mean) / (deviation + 1e-4) within the answers to a prompt, the unbiased deviation.

    With policy = old and the mean by answers, the policy's term is minus the mean advantage, which is 0 when the
    train batch holds whole groups. Two answers that score 0 and 1 have ∓0.7070.
    """

    groups: ClassVar[bool] = True

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, standardized)


def standardized(values: Tensor) -> Tensor:
    away = centred(values)
    deviation = (away.square().sum() / max(1, len(values) - 1)).sqrt()
    return away / (deviation + EPS)
