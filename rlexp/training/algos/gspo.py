"""GSPO (Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.algos.clipped import logged
from rlexp.training.algos.grpo import GRPO
from rlexp.training.algos.policy_loss import PolicyTerms, PolicyTokens


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO's advantages, with one ratio for the whole answer: exp(mean over its tokens of log π − log π_old).

    The policy's term is a mean over answers, and the clipping range a thousandth of GRPO's. With policy = old its value
    and gradient are those of GRPO with loss.normalize=sequence. Divergence and entropy stay terms of single tokens. The
    importance weight of an answer is a mean over its tokens too.
    """

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        length_S = tokens.length_S.clamp(min=1)

        def mean(values_n: Tensor) -> Tensor:
            """Return the mean over each answer's tokens, (S,); 0 for an empty answer."""
            return tokens.by_sequence(values_n) / length_S

        ratio_S = torch.exp(mean(tokens.logps_n - tokens.old_n))
        losses_S, clipped_S = self.surrogate(ratio_S, mean(tokens.advantages_n))
        policy = (tokens.weight_S * losses_S * self.importance(mean(tokens.old_n - tokens.behaviour_n))).sum()
        others = self.other_terms(tokens, kl_coef)
        ratio_n = by_token(ratio_S.detach(), tokens)
        return PolicyTerms(
            loss=policy + sum(others.values()),
            weighted={name: term.detach() for name, term in others.items()},
            replicated={"loss/policy_avg": policy.detach()},
            means_n=logged(tokens, ratio_n, by_token(clipped_S, tokens)),
            peaks_n={"val/ratio_max": ratio_n},
        )


def by_token(values_S: Tensor, tokens: PolicyTokens) -> Tensor:
    """Return for each token, (n,), the value of its sequence."""
    return values_S[tokens.sequence_n]
