"""IPO (Azar et al. 2023, A General Theoretical Paradigm, arXiv 2310.12036, equation 17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlexp.config.schema.losses import IPONormalize
from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import log_ratios, per_token
from rlexp.training.algos.preference import Formula


@dataclass(frozen=True)
class IPO(Formula):
    """(chosen − rejected − 1/(2β))², of log-ratios per token or of whole answers. β is the paper's τ.

    The logged rewards are of whole answers either way.
    """

    normalize: IPONormalize = IPONormalize.token

    def losses(self, values: Values) -> Tensor:
        by_token = self.normalize is IPONormalize.token
        chosen_P, rejected_P = log_ratios(per_token(values) if by_token else values)
        return (chosen_P - rejected_P - 1 / (2 * self.beta)) ** 2
