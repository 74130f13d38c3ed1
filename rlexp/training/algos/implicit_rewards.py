"""Implicit rewards, which every loss of the DPO family logs."""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.training.algos.base import PairLogps

# A margin is a tie within this many units of float32's last place, per unit of the log-probabilities' magnitude.
# Largest difference measured between float32 and float64, with `model=tiny` over rings of 1 to 8: 0.09.
TIE_ULPS = 1.0
ULP = 2.0**-23  # float32's, in float64 too, so that a curve does not depend on the precision


def implicit_rewards(policy: PairLogps, reference: PairLogps, beta: float) -> dict[str, Tensor]:
    """Return β times the log-ratio of policy and reference, detached, and what is derived from it."""
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


def accuracies(margins_P: Tensor, magnitude_P: Tensor) -> Tensor:
    """Return 1 where the chosen answer is ahead, 0 where it is behind, and ½ within rounding of a tie.

    A count of comparisons is not continuous. While policy and reference still agree, the margin's sign is that of a
    rounding error, which differs between layouts.
    """
    band_P = TIE_ULPS * ULP * magnitude_P
    return torch.where(margins_P.abs() <= band_P, 0.5, (margins_P > 0).to(margins_P.dtype))
