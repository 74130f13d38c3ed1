"""DiscoPOP (Lu et al. 2024, Discovering Preference Optimization Algorithms, arXiv 2406.08414, equation 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class DiscoPOP(Formula):
    """(1 − s)·(−log σ(m)) + s·exp(−m), where m = β·margin with the margin of DPO, and s = σ(m/τ).

    The second summand is computed as one power, since exp(−m) overflows where s·exp(−m) does not.
    """

    tau: float = 0.05

    def losses(self, values: Values) -> Tensor:
        margin_P = margins(values, self.beta)
        scaled_P = margin_P / self.tau
        return torch.sigmoid(-scaled_P) * logistic(margin_P) + torch.exp(F.logsigmoid(scaled_P) - margin_P)
