"""Implicit rewards, as every loss of the DPO family logs them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.algos.base import PairLogps

# Units of float32's last place, per unit of the log-probabilities' magnitude, within which a margin is a tie.
# Measured with `model=tiny` over rings of 1 to 8 in float32 against float64: at most 0.09.
TIE_ULPS = 1.0


def implicit_rewards(policy: PairLogps, reference: PairLogps, beta: float) -> dict[str, Tensor]:
    """β times the log-ratio of policy and reference, detached."""
    with torch.no_grad():
        chosen_P = beta * (policy.chosen_P - reference.chosen_P)
        rejected_P = beta * (policy.rejected_P - reference.rejected_P)
        magnitude_P = sum(
            (part.abs() for part in (policy.chosen_P, policy.rejected_P, reference.chosen_P, reference.rejected_P)),
            start=torch.zeros_like(chosen_P),
        )
    return {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/accuracies": accuracies(chosen_P - rejected_P, beta * magnitude_P),
        "rewards/margins": chosen_P - rejected_P,
    }


def accuracies(margins_P: Tensor, magnitude_P: Tensor, eps: float = 2.0**-23) -> Tensor:
    """1 where the chosen answer is ahead, 0 where it is behind, and ½ within rounding of a tie.

    A count of comparisons is not continuous: where policy and reference still agree, the sign of the margin is
    that of a rounding error, which another layout rounds otherwise. `eps` is float32's, the coarsest in which
    log-probabilities are computed, in float64 too: a curve should not depend on the precision either.
    """
    band_P = TIE_ULPS * eps * magnitude_P
    return torch.where(margins_P.abs() <= band_P, 0.5, (margins_P > 0).to(margins_P.dtype))
