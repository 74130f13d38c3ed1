"""CPO (Xu et al. 2024, arXiv 2401.08417). Its likelihood of the chosen answers is `loss.sft_weight`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class CPO(Formula):
    """−log σ(β·(chosen − rejected)), of log-probabilities: DPO with a reference that gives all answers alike."""

    label_smoothing: float = 0.0
    needs: ClassVar[Wanted] = Wanted()

    def losses(self, values: Values) -> Tensor:
        return logistic(margins(values, self.beta, self.margin_weight), self.label_smoothing)
