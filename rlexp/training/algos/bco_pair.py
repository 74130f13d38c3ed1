"""BCO on pairs (Jung et al. 2024, Binary Classifier Optimization, arXiv 2404.04656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.config.schema.losses import Shift
from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula
from rlexp.training.algos.reward_shift import moved_shift, shift_of
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class BCOPair(Formula):
    """−log σ(chosen − δ) − log σ(−(rejected − δ)), of rewards.

    δ is 0, or the mean reward of all answers that have been trained on, with those of this train batch. No gradient
    passes through it.
    """

    shift: Shift = Shift.mean

    @property
    def wanted(self) -> Wanted:
        return super().wanted | Wanted(whole_batch=self.shift is Shift.mean)

    def losses(self, values: Values) -> Tensor:
        chosen_P, rejected_P = (self.beta * ratio_P for ratio_P in log_ratios(values))
        delta = shift_of(self.carried(values), "bco_pair")
        return logistic(chosen_P - delta) + logistic(delta - rejected_P)

    def logged(self, values: Values) -> Mapping[str, Tensor]:
        shift = shift_of(self.carried(values), "bco_pair")
        return {"bco_pair/shift": torch.full_like(values.tokens["chosen"], shift)}

    def carried(self, values: Values) -> Mapping[str, float]:
        if self.shift is Shift.none:
            return {}
        return moved_shift(values, "bco_pair", self.beta * torch.cat(log_ratios(values)).detach())
