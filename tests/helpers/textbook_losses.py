"""The losses over pairs on plain numbers, as their papers write them. No code of the product's losses.

`sums` are sums of the answers' log-probabilities, as "policy/chosen".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlexp.verify.recording import Array
from tests.oracles.examples import SIDES

TIE = 2.0**-23  # relative to the log-probabilities: a smaller margin is a tie, and counts half


def sigmoid(x: Array) -> Array:
    values: Array = np.exp(log_sigmoid(x))
    return values


def log_sigmoid(x: Array) -> Array:
    values: Array = -np.logaddexp(0.0, -x)
    return values


def log_ratios(sums: Mapping[str, Array]) -> tuple[Array, Array]:
    chosen, rejected = (sums[f"policy/{side}"] - sums[f"reference/{side}"] for side in SIDES)
    return chosen, rejected


def losses_of(name: str, sums: Mapping[str, Array], tokens: Mapping[str, Array], *, beta: float,
              margin: float | Array = 0.0, label_smoothing: float = 0.0, gamma: float = 0.0, tau: float = 1.0,
              normalize: str = "token", shift: float = 0.0) -> Array:  # fmt: skip
    """The loss of each pair, as the papers write it. `margin` is what the rows ask for, with its weight."""
    chosen, rejected = log_ratios(sums)
    policy = {side: sums[f"policy/{side}"] for side in SIDES}
    per_token = {side: policy[side] / tokens[side] for side in SIDES}  # log-probabilities
    by_token = chosen / tokens["chosen"] - rejected / tokens["rejected"]
    x, y, z = beta * chosen, beta * rejected, beta * (chosen - rejected) - margin
    e = label_smoothing
    match name:
        case "dpo":
            return _cross_entropy(z, e)
        case "dpo_norm":
            return _cross_entropy(beta * by_token - margin, e)
        case "ipo":
            return np.square((by_token if normalize == "token" else chosen - rejected) - 0.5 / beta)
        case "apo_zero":
            return 1 - sigmoid(x) + sigmoid(y)
        case "apo_down":
            return sigmoid(x) + 1 - sigmoid(x - y)
        case "simpo":
            return np.log1p(np.exp(gamma + margin - beta * (per_token["chosen"] - per_token["rejected"])))
        case "orpo":
            odds = {side: np.exp(logp) / (1 - np.exp(logp)) for side, logp in per_token.items()}
            return beta * np.log1p(odds["rejected"] / odds["chosen"])
        case "cpo":
            return _cross_entropy(beta * (policy["chosen"] - policy["rejected"]) - margin, e)
        case "bco_pair":
            return np.log1p(np.exp(shift - x)) + np.log1p(np.exp(y - shift))
        case "hinge":
            return np.maximum(0.0, 1 - z)
        case "robust":
            return (_cross_entropy(z, 0.0) * (1 - e) - _cross_entropy(z, 1.0) * e) / (1 - 2 * e)
        case "aot":
            reference = sums["reference/chosen"] - sums["reference/rejected"]
            return _cross_entropy(beta * _over_equal_ranks(policy["chosen"] - policy["rejected"], reference), e)
        case "aot_unpaired":
            return _cross_entropy(beta * _over_equal_ranks(chosen, rejected), e)
        case "exo_pair":
            q, p = np.stack([sigmoid(z), sigmoid(-z)]), np.array([[1 - e], [e]])
            return (q * np.log(q / p)).sum(0)
        case "nca_pair":
            return -log_sigmoid(x) - (log_sigmoid(-x) + log_sigmoid(-y)) / 2
        case "sppo_hard":
            return np.square(chosen - 0.5 / beta) + np.square(rejected + 0.5 / beta)
        case "discopop":
            mixed = sigmoid(z / tau)
            return -(1 - mixed) * log_sigmoid(z) + mixed * np.exp(-z)
        case _:
            raise NotImplementedError(name)


def _cross_entropy(z: Array, wrong: float) -> Array:
    return -(1 - wrong) * log_sigmoid(z) - wrong * log_sigmoid(-z)


def _over_equal_ranks(values: Array, others: Array) -> Array:
    """Each value, less that of the others which as many are below."""
    below = [sum(other < value for other in values) + sum(other == value for other in values[:place])
             for place, value in enumerate(values)]  # fmt: skip
    return values - np.array([sorted(others)[rank] for rank in below])


def rewards(sums: Mapping[str, Array], beta: float) -> dict[str, Array]:
    """Rewards of each pair. A margin within rounding of zero counts half."""
    chosen, rejected = (beta * ratio for ratio in log_ratios(sums))
    band = TIE * beta * sum(np.abs(part) for part in sums.values())
    margin = chosen - rejected
    won = np.where(np.abs(margin) <= band, 0.5, np.where(margin > 0, 1.0, 0.0))
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margin,
        "rewards/accuracies": won,
    }
