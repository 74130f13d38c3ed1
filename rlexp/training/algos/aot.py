"""AOT (Melnyk et al. 2024, Alignment via Optimal Transport, arXiv 2406.05882), paired and unpaired.

Two distributions over the train batch are compared, each value with the value of the same rank. A sort is stable, so
that among equal values those of earlier pairs come first on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class AOT(Formula):
    """−log σ(β·(policy − reference)), of log π(chosen) − log π(rejected): the policy prefers as the reference, or more.

    The loss of a pair is the one where the policy's value is its own.
    """

    label_smoothing: float = 0.0
    needs: ClassVar[Wanted] = Wanted(reference=True, whole_batch=True)

    def losses(self, values: Values) -> Tensor:
        policy_P, reference_P = self.compared(values)
        return logistic(self.beta * (policy_P - of_the_same_rank(reference_P, policy_P)), self.label_smoothing)

    def compared(self, values: Values) -> tuple[Tensor, Tensor]:
        assert values.reference is not None
        policy, reference = values.logps, values.reference
        return policy["chosen"] - policy["rejected"], reference["chosen"] - reference["rejected"]


@dataclass(frozen=True)
class AOTUnpaired(AOT):
    """−log σ(β·(chosen − rejected)), of log-ratios: chosen answers are compared with any rejected ones.

    The loss of a pair is the one where the chosen answer is its own.
    """

    def compared(self, values: Values) -> tuple[Tensor, Tensor]:
        return log_ratios(values)


def of_the_same_rank(values_P: Tensor, places_P: Tensor) -> Tensor:
    """Return, for each of `places_P`, that of `values_P` which has the same rank among them."""
    ranks_P = places_P.detach().argsort(stable=True).argsort(stable=True)
    return values_P[values_P.detach().argsort(stable=True)][ranks_P]
