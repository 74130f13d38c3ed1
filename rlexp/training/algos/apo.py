"""APO (D'Oosterlinck et al. 2024, Anchored Preference Optimization, arXiv 2408.06266, equations 7 and 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios
from rlexp.training.algos.preference import Formula
from rlexp.training.algos.unpaired import Unpaired


@dataclass(frozen=True)
class APOZero(Formula):
    """σ(−chosen) + σ(rejected), of rewards: where the chosen answers are better than the policy's own."""

    def losses(self, values: Values) -> Tensor:
        chosen_P, rejected_P = (self.beta * ratio_P for ratio_P in log_ratios(values))
        return torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P)


@dataclass(frozen=True)
class APODown(Formula):
    """σ(chosen) + σ(rejected − chosen), of rewards: where the policy's own answers are better than the chosen ones."""

    def losses(self, values: Values) -> Tensor:
        chosen_P, rejected_P = (self.beta * ratio_P for ratio_P in log_ratios(values))
        return torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P)


@dataclass(frozen=True)
class APOZeroUnpaired(Unpaired):
    """σ(−reward) of good answers, and σ(reward) of bad ones: APOZero's two terms, each of an answer of its own."""

    def losses(self, ahead_E: Tensor) -> Tensor:
        return torch.sigmoid(-ahead_E)
