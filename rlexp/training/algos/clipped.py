"""Base of the algorithms of reinforcement learning: clipped ratio, divergence and entropy in the loss, metrics.

    ratio = exp(log π − log π_old),  loss = max(−A·ratio, −A·clamp(ratio, 1 − clip_low, 1 + clip_high))

With policy = old the ratio is 1 and nothing is clipped. The loss of a token is −A and its gradient is −A·∇log π, as in
REINFORCE. Shape letters: n tokens of answers on this rank, S sequences of a micro-batch, N samples of a rollout, L
tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.config.schema.losses import KLEstimator, KLPlace
from rlexp.training.algos.gae import token_rewards
from rlexp.training.algos.kl import estimate
from rlexp.training.algos.policy_loss import Outcomes, PolicyTerms, PolicyTokens, Spread
from rlexp.training.types import Wanted


@dataclass(frozen=True, kw_only=True)
class ClippedRatio:
    """Base class. A subclass defines `credit`, what each answer has earned, and overrides whatever else differs."""

    beta: float
    kl_in: KLPlace
    kl: KLEstimator
    clip_low: float
    clip_high: float
    dual_clip: float | None
    entropy: float
    importance_cap: float | None  # bound of exp(old − behaviour), a factor of the policy's term; None: no such factor

    @property
    def wanted(self) -> Wanted:
        return Wanted(reference=self.beta > 0, entropies=True, entropy_gradient=self.entropy > 0, decoding=True)

    def earned(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        """Return the scores, (N,), less the price of each whole answer's divergence if that is part of the reward."""
        if self.kl_in is KLPlace.reward:
            return outcomes.scores_N - kl_coef * outcomes.kl_N
        return outcomes.scores_N

    def rewards(self, score: float, kl_L: Tensor, kl_coef: float) -> Tensor:
        """Return the same token by token, (L,)."""
        return token_rewards(score, kl_L, kl_coef if self.kl_in is KLPlace.reward else 0.0)

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> Spread:  # noqa: ARG002
        """Give every token of an answer the credit of the whole answer."""
        return Spread(torch.full_like(kl_L, credit, dtype=torch.float64))

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        ratio_n = torch.exp(tokens.logps_n - tokens.old_n)
        losses_n, clipped_n = self.surrogate(ratio_n, tokens.advantages_n)
        policy = (tokens.weight_n * losses_n * self.importance(tokens.old_n - tokens.behaviour_n)).sum()
        others = self.other_terms(tokens, kl_coef)
        return PolicyTerms(
            loss=policy + sum(others.values()),
            weighted={"loss/policy_avg": policy.detach()} | {name: term.detach() for name, term in others.items()},
            replicated={},
            means_n=logged(tokens, ratio_n, clipped_n),
            peaks_n={"val/ratio_max": ratio_n.detach()},
        )

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token (or sequence), and 1.0 where a clipped branch decides it, else 0.0.

        Within the range the clamped ratio equals the ratio to the last bit, so rounding near 1 clips nothing.
        """
        plain = -advantages * ratio
        losses = torch.maximum(plain, -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high))
        if self.dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * self.dual_clip), losses)
        return losses, (losses != plain).detach().to(ratio.dtype)

    def importance(self, log_ratio: Tensor) -> Tensor | float:
        """Return the importance weight of each token (or sequence): exp(log_ratio), capped; 1 without a cap."""
        return 1.0 if self.importance_cap is None else log_ratio.exp().clamp(max=self.importance_cap)

    def other_terms(self, tokens: PolicyTokens, kl_coef: float) -> dict[str, Tensor]:
        """Return the terms of divergence and entropy as they enter the loss."""
        terms = {}
        if self.wanted.reference and self.kl_in is KLPlace.loss:
            assert tokens.reference_n is not None
            kl_n = estimate(self.kl, tokens.logps_n - tokens.reference_n)
            terms["loss/kl"] = kl_coef * (tokens.weight_n * kl_n).sum()
        if self.wanted.entropy_gradient:
            terms["loss/entropy"] = -self.entropy * (tokens.weight_n * tokens.entropy_n).sum()
        return terms


@torch.no_grad()
def logged(tokens: PolicyTokens, ratio_n: Tensor, clipped_n: Tensor) -> dict[str, Tensor]:
    """Return the metrics of each token, under TRL's names where TRL has one."""
    values_n = {
        "policy/approxkl_avg": (tokens.logps_n - tokens.old_n).square() / 2,
        "policy/clipfrac_avg": clipped_n,
        "policy/entropy_avg": tokens.entropy_n,
        "val/ratio": ratio_n,
        "val/behaviour_ratio": torch.exp(tokens.old_n - tokens.behaviour_n),
    }
    if tokens.reference_n is not None:
        values_n["policy/kl_avg"] = estimate(KLEstimator.k3, tokens.logps_n - tokens.reference_n)
    return {name: each.detach() for name, each in values_n.items()}


def by_group(values_N: Tensor, group_N: Tensor, credit: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `credit` to the values of each group, and return the results in the order of `values_N`."""
    order_N = torch.argsort(group_N, stable=True)
    sizes = torch.unique_consecutive(group_N[order_N], return_counts=True)[1].tolist()
    result_N = torch.empty_like(values_N)
    result_N[order_N] = torch.cat([credit(each) for each in values_N[order_N].split(sizes)])
    return result_N
