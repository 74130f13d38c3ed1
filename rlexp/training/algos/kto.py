"""KTO (Ethayarajh et al. 2024, Kahneman-Tversky Optimization, arXiv 2402.01306, equations 6 to 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.unpaired import Unpaired
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class KTO(Unpaired):
    """1 − σ(reward − β·KL) of good answers, and 1 − σ(β·KL − reward) of bad ones.

    The KL of policy and reference is estimated by answers to other prompts: the mean of their log-ratios over the whole
    train batch, or 0 if that is less. No gradient passes through it.
    """

    needs: ClassVar[Wanted] = Wanted(reference=True, labels=True, mismatched=True)

    def losses(self, ahead_E: Tensor) -> Tensor:
        return torch.sigmoid(-ahead_E)

    def point(self, values: Values) -> float:
        assert values.mismatched_B is not None
        return self.beta * max(0.0, float(values.mismatched_B.mean()))

    def logged(self, point: float) -> Mapping[str, float]:
        return {"kl": point / self.beta}
