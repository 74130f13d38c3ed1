"""RLOO (Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740; Kool et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.algos.clipped import ClippedRatio, by_group
from rlexp.algos.policy import Outcomes
from rlexp.algos.whiten import centred


@dataclass(frozen=True, kw_only=True)
class RLOO(ClippedRatio):
    """score − β·divergence, less the mean of the *other* answers to the prompt: n / (n − 1) of the distance from the
    mean of all n.

    With policy = old the gradient is −A·∇log π(answer), that of the whole answer: the ratio by token and the ratio of
    the answer (TRL's) have the same there; after the first step the ratio by token is what is clipped. Two answers
    that score 0 and 1 have ∓1.
    """

    groups: ClassVar[bool] = True

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        return by_group(self.earned(outcomes, kl_coef), outcomes.group_N, less_the_others)


def less_the_others(values: Tensor) -> Tensor:
    return centred(values) * (len(values) / max(1, len(values) - 1))
