"""ORPO (Hong et al. 2024, arXiv 2403.07691, equation 7). Its likelihood of the chosen answers is `loss.sft_weight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlexp.training.algos.base import Values
from rlexp.training.algos.log_ratios import per_token
from rlexp.training.algos.logistic import logistic
from rlexp.training.algos.preference import Formula
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class ORPO(Formula):
    """−β·log σ(the log of the chosen answer's odds over the rejected one's).

    An answer's odds are p/(1 − p), where p is the geometric mean of its tokens' probabilities. There is no reference.
    """

    needs: ClassVar[Wanted] = Wanted()

    def rewarded(self, values: Values) -> Values:
        return per_token(values)

    def losses(self, values: Values) -> Tensor:
        return self.beta * logistic(log_odds_ratio(values))

    def logged(self, values: Values) -> Mapping[str, Tensor]:
        log_odds_P = log_odds_ratio(values).detach()
        return {"log_odds_chosen": log_odds_P, "log_odds_ratio": -logistic(log_odds_P)}


def log_odds_ratio(values: Values) -> Tensor:
    means = per_token(values).logps
    return log_odds(means["chosen"]) - log_odds(means["rejected"])


def log_odds(logp_P: Tensor) -> Tensor:
    """Return log(p/(1 − p)) for log p. `expm1` keeps the digits of 1 − p near p = 1.

    In float64, log p is exact to no more than its epsilon: p = 1 is taken as 1 − epsilon, and its gradient as 0.
    """
    logp_P = logp_P.clamp(max=-torch.finfo(logp_P.dtype).eps)
    return logp_P - torch.log(-torch.expm1(logp_P))
