"""Advantages of the tokens of one answer, in float64. After the last token no reward is expected."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor


def token_rewards(score: float, kl_L: Tensor, kl_coef: float) -> Tensor:
    """Return the reward of each token, (L,): minus the price of its divergence, plus the score at the last token."""
    rewards_L = -kl_coef * kl_L.double()
    rewards_L[-1:] += score  # an empty answer has no last token
    return rewards_L


def gae(rewards_L: Tensor, values_L: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438).

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}. With λ = 1 that is return-to-go − V_t, with λ = 0 it is δ_t.
    """
    values_L = values_L.double()
    later_L = torch.cat([values_L[1:], torch.zeros_like(values_L[:1])])
    deltas = (rewards_L + gamma * later_L - values_L).flip(0).tolist()
    backwards = list(accumulate(deltas, lambda later, delta: delta + gamma * lam * later))
    return torch.tensor(backwards, dtype=torch.float64).flip(0)


def returns_to_go(rewards_L: Tensor) -> Tensor:
    """Return for each token the sum of its reward and all later ones: no discount, no critic."""
    return rewards_L.flip(0).cumsum(0).flip(0)
