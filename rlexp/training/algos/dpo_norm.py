"""Length-normalized DPO (Lambert et al. 2024, Tülu 3, arXiv 2411.15124)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins, per_token
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class DPONorm(Formula):
    """−log σ(β·margin), where the margin is of log-ratios per token. The logged rewards are of whole answers."""

    label_smoothing: float = 0.0

    def losses(self, values: Values) -> Tensor:
        return logistic(margins(per_token(values), self.beta, self.margin_weight), self.label_smoothing)
