"""What losses on given answers are made of: log-ratios of policy and reference, the rewards that they imply, the
logistic loss, and BCO's shift, which outlives the step. Shape letters: P pairs, E examples, B of the train batch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.training.algos.base import Sides, Values

# A margin is a tie within this many units of float32's last place, per unit of the log-probabilities' magnitude.
# Largest difference measured between float32 and float64, with `model=tiny` over rings of 1 to 8: 0.09.
TIE_ULPS = 1.0
ULP = 2.0**-23  # float32's, in float64 too, so that a curve does not depend on the precision


def log_ratios(values: Values) -> tuple[Tensor, Tensor]:
    """Return log π − log π_ref of the chosen and of the rejected answers; log π alone without a reference."""
    return log_ratio(values, "chosen"), log_ratio(values, "rejected")


def log_ratio(values: Values, side: str) -> Tensor:
    logps_E = values.logps[side]
    return logps_E if values.reference is None else logps_E - values.reference[side]


def per_token(values: Values) -> Values:
    """Return the same with means over the answer's trained tokens in the place of sums."""

    def means(sums: Sides) -> Sides:
        return {side: sum_P / values.tokens[side].clamp(min=1) for side, sum_P in sums.items()}

    reference = None if values.reference is None else means(values.reference)
    return replace(values, logps=means(values.logps), reference=reference)


@torch.no_grad()
def implicit_rewards(values: Values, beta: float) -> dict[str, Tensor]:
    """Return β times the log-ratios, and what is derived from them."""
    chosen_P, rejected_P = (beta * ratio_P.detach() for ratio_P in log_ratios(values))
    parts = [*values.logps.values(), *(values.reference or {}).values()]
    magnitude_P = sum((part_P.detach().abs() for part_P in parts), start=torch.zeros_like(chosen_P))
    return reward_metrics(chosen_P, rejected_P, beta * magnitude_P)


def reward_metrics(chosen_P: Tensor, rejected_P: Tensor, magnitude_P: Tensor) -> dict[str, Tensor]:
    return {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/accuracies": accuracies(chosen_P - rejected_P, magnitude_P),
        "rewards/margins": chosen_P - rejected_P,
    }


def accuracies(margins_P: Tensor, magnitude_P: Tensor) -> Tensor:
    """Return 1 where the chosen answer is ahead, 0 where it is behind, and ½ within rounding of a tie.

    A count of comparisons is not continuous. While policy and reference still agree, the margin's sign is that of a
    rounding error, which differs between layouts.
    """
    band_P = TIE_ULPS * ULP * magnitude_P
    return torch.where(margins_P.abs() <= band_P, 0.5, (margins_P > 0).to(margins_P.dtype))


def logistic(margin_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return −log σ(margin), in the mean over labels of which the share `label_smoothing` is wrong, (P,)."""
    right_P = -F.logsigmoid(margin_P)
    if not label_smoothing:
        return right_P
    return (1 - label_smoothing) * right_P - label_smoothing * F.logsigmoid(-margin_P)


def shift_of(values: Values, loss: str, rewards_B: Tensor) -> tuple[float, dict[str, float]]:
    """Return the mean reward of all answers trained on so far, with those of a train batch; and what the loss carries:
    this mean, and how many answers it is of. Held-out ones do not move it, and before the first answer it is 0."""
    names = rewards, answers = f"{loss}/rewards", f"{loss}/answers"
    before = {name: values.carried[name] for name in names if name in values.carried}
    mean = before.get(rewards, 0.0)
    if values.held_out or not len(rewards_B):
        return mean, before
    count = before.get(answers, 0.0) + len(rewards_B)
    mean += (float(rewards_B.sum()) - len(rewards_B) * mean) / count
    return mean, {rewards: mean, answers: count}
