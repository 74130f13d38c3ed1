"""The divergence from the reference: what a token says of it, and who moves its coefficient.

From a token's log-ratio d = policy − reference (Schulman, joschu.net/blog/kl-approx.html); all three are the
divergence in the mean over tokens that the policy draws, k2 nearly so. As a term of the loss it is the gradient that
counts: k1's does not know the reference and is zero in the mean, k2's is d·∇log π.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.config.schema import KLEstimator

MOST = 0.2  # of itself, that the coefficient moves in one rollout


def estimate(kind: KLEstimator, d: Tensor) -> Tensor:
    """Of each token's divergence; differentiable."""
    match kind:
        case KLEstimator.k1:
            return d
        case KLEstimator.k2:
            return d * d / 2
        case KLEstimator.k3:
            return torch.expm1(-d) + d  # near 0, exp(−d) − 1 would leave d's last digits only


@dataclass
class KLController:
    """The coefficient of the divergence. With a target it follows what is measured (Ziegler et al. 2019, arXiv
    1909.08593), up where the answers are further from the reference than that, down where they are nearer; without
    one it stays. `beta` is the whole state."""

    beta: float
    target: float | None  # divergence of an answer, summed over its tokens
    horizon: int  # samples over which it moves by as much as it may

    def update(self, kl: float, samples: int) -> None:
        """After a rollout: `kl` is the mean over its samples."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MOST), MOST)
        self.beta *= 1 + error * min(1.0, samples / self.horizon)  # with more samples than that it could turn negative
