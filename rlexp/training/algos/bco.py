"""BCO on single answers (Jung et al. 2024, Binary Classifier Optimization, arXiv 2404.04656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlexp.config.schema.losses import Shift
from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratio
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.reward_shift import moved_shift, shift_of
from rlexp.training.algos.unpaired import Unpaired
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class BCO(Unpaired):
    """−log σ(reward − δ) of good answers, and −log σ(δ − reward) of bad ones.

    δ is 0, or the mean reward of all answers that have been trained on, with those of this train batch. No gradient
    passes through it.
    """

    shift: Shift = Shift.mean

    @property
    def wanted(self) -> Wanted:
        return super().wanted | Wanted(whole_batch=self.shift is Shift.mean)

    def losses(self, ahead_E: Tensor) -> Tensor:
        return logistic(ahead_E)

    def point(self, values: Values) -> float:
        return shift_of(self.carried(values), "bco")

    def logged(self, point: float) -> Mapping[str, float]:
        return {"bco/shift": point}

    def carried(self, values: Values) -> Mapping[str, float]:
        if self.shift is Shift.none:
            return {}
        return moved_shift(values, "bco", self.beta * log_ratio(values, "answer").detach())
