"""Robust DPO (Ray Chowdhury et al. 2024, Provably Robust DPO, arXiv 2403.00409)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class Robust(Formula):
    """(−(1 − ε)·log σ(β·margin) + ε·log σ(−β·margin)) / (1 − 2ε), with the margin of DPO.

    If each label is wrong with probability ε, its mean over the labels is DPO's loss of the right labels.
    """

    label_smoothing: float = 0.1

    def losses(self, values: Values) -> Tensor:
        margin_P = margins(values, self.beta, self.margin_weight)
        wrong = self.label_smoothing
        return ((1 - wrong) * logistic(margin_P) - wrong * logistic(-margin_P)) / (1 - 2 * wrong)
