"""RLOO (Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740; Kool et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.clipped import ClippedRatio, by_group
from rlexp.training.algos.policy_loss import Outcomes
from rlexp.training.algos.whiten import centred


@dataclass(frozen=True, kw_only=True)
class RLOO(ClippedRatio):
    """Advantage: score − β·divergence, less the mean of the same over the *other* answers to the prompt.

    It equals n / (n − 1) times the distance from the mean of all n answers. With policy = old the gradient is
    −A·∇log π(answer): there a ratio for each token and a ratio for the whole answer (as in TRL) agree. After the first
    step the ratio of each token is clipped. Two answers that score 0 and 1 have the advantages ∓1.
    """

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, less_the_others)


def less_the_others(values: Tensor) -> Tensor:
    return centred(values) * (len(values) / max(1, len(values) - 1))
