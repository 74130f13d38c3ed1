"""EXO on pairs (Ji et al. 2024, Efficient Exact Optimization, arXiv 2402.00856, equation 16)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class EXOPair(Formula):
    """KL(q ‖ p) over the two answers: q = (σ(β·margin), σ(−β·margin)) with the margin of DPO, and p = (1 − ε, ε)."""

    label_smoothing: float = 1e-3

    def losses(self, values: Values) -> Tensor:
        margin_P = margins(values, self.beta)
        chosen_P = torch.sigmoid(margin_P) * (F.logsigmoid(margin_P) - math.log1p(-self.label_smoothing))
        return chosen_P + torch.sigmoid(-margin_P) * (F.logsigmoid(-margin_P) - math.log(self.label_smoothing))
