"""The divergence from the reference: its estimate for each token, and the controller of its coefficient.

An estimate is a function of a token's log-ratio d = policy − reference (Schulman, joschu.net/blog/kl-approx.html). Over
tokens that the policy draws, the mean of k1 and of k3 is the divergence, and that of k2 nearly so. In the loss only the
gradient matters: that of k1 does not depend on the reference and is zero in the mean, that of k2 is d·∇log π.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.config.schema.losses import KLEstimator

MOST = 0.2  # largest relative change of the coefficient after one rollout


def estimate(kind: KLEstimator, d: Tensor) -> Tensor:
    """Return the estimate of each token's divergence; it is differentiable."""
    match kind:
        case KLEstimator.k1:
            return d
        case KLEstimator.k2:
            return d * d / 2
        case KLEstimator.k3:
            return torch.expm1(-d) + d  # near 0, exp(−d) − 1 + d would keep none of its digits


@dataclass
class KLController:
    """The coefficient of the divergence. Its whole state is `beta`.

    With a target it rises while the measured divergence is above the target and falls while it is below (Ziegler et al.
    2019, arXiv 1909.08593). Without a target it stays.
    """

    beta: float
    target: float | None  # divergence of an answer, summed over its tokens
    horizon: int  # samples after which one update makes its full change

    def update(self, kl: float, samples: int) -> None:
        """Adapt `beta` after a rollout of `samples` samples whose mean divergence is `kl`."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -MOST), MOST)
        self.beta *= 1 + error * min(1.0, samples / self.horizon)  # without min() beta could turn negative
