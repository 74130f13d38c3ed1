"""SPPO (Wu et al. 2024, Self-Play Preference Optimization, arXiv 2405.00675, equation 4.7), with hard labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class SPPOHard(Formula):
    """(chosen − 1/(2β))² + (rejected + 1/(2β))², of log-ratios: the chosen answer wins with probability 1.

    1/β is the paper's η.
    """

    def losses(self, values: Values) -> Tensor:
        chosen_P, rejected_P = log_ratios(values)
        return (chosen_P - 1 / (2 * self.beta)) ** 2 + (rejected_P + 1 / (2 * self.beta)) ** 2
