"""SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins, per_token
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class SimPO(Formula):
    """−log σ(β·(chosen − rejected) − γ), of log-probabilities per token, without a reference."""

    gamma: float = 1.0
    needs: ClassVar[Wanted] = Wanted()

    def rewarded(self, values: Values) -> Values:
        return per_token(values)

    def losses(self, values: Values) -> Tensor:
        return logistic(margins(per_token(values), self.beta, self.margin_weight) - self.gamma)
