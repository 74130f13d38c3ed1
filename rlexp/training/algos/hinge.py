"""The hinge loss (Zhao et al. 2023, SLiC-HF, arXiv 2305.10425), on DPO's margin (Liu et al. 2023, arXiv 2309.06657)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class Hinge(Formula):
    """max(0, 1 − β·margin), with the margin of DPO."""

    def losses(self, values: Values) -> Tensor:
        return torch.relu(1 - margins(values, self.beta, self.margin_weight))
