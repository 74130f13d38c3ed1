"""NCA on pairs (Chen et al. 2024, Noise Contrastive Alignment, arXiv 2402.05369)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class NCAPair(Formula):
    """−log σ(chosen) − ½·log σ(−chosen) − ½·log σ(−rejected), of rewards."""

    def losses(self, values: Values) -> Tensor:
        chosen_P, rejected_P = (self.beta * ratio_P for ratio_P in log_ratios(values))
        return logistic(chosen_P) + 0.5 * (logistic(-chosen_P) + logistic(-rejected_P))
