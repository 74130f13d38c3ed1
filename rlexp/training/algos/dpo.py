"""DPO (Rafailov et al. 2023, arXiv 2305.18290), the sigmoid loss, with label smoothing as in cDPO."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import margins
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class DPO(Formula):
    """−log σ(β·margin). The margin is the chosen answer's log-ratio of policy to reference, less the rejected one's.

    With policy = reference the margin is 0 and every loss is ln 2.
    """

    label_smoothing: float = 0.0

    def losses(self, values: Values) -> Tensor:
        return logistic(margins(values, self.beta, self.margin_weight), self.label_smoothing)
