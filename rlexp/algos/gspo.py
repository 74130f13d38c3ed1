"""GSPO (Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.algos.clipped import logged
from rlexp.algos.grpo import GRPO
from rlexp.algos.policy import PolicyTerms, PolicyTokens


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO's advantages with one ratio for the whole answer, exp(mean of log π − log π_old over its tokens), and the
    mean over answers. The clipping range is therefore a thousandth of GRPO's.

    With policy = old its value and its gradient are those of GRPO with the mean by answers. The divergence and the
    entropy stay terms by token. The importance of an answer is of the same kind as its ratio.
    """

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        length_S = tokens.length_S.clamp(min=1)

        def mean(values_t: Tensor) -> Tensor:
            """(S,): over the answer's tokens; 0 of an answer that is not trained on."""
            return tokens.by_sequence(values_t * tokens.trained_t) / length_S

        ratio_S = torch.exp(mean(tokens.logps_t - tokens.old_t))
        losses_S, clipped_S = self.surrogate(ratio_S, mean(tokens.advantages_t))
        policy = (tokens.weight_S * losses_S * self.importance(mean(tokens.old_t - tokens.behaviour_t))).sum()
        others = self.other_terms(tokens, kl_coef)
        ratio_t = by_token(ratio_S.detach(), tokens, elsewhere=1.0)
        return PolicyTerms(
            loss=policy + sum(others.values()),
            weighted={name: term.detach() for name, term in others.items()},
            replicated={"loss/policy_avg": policy.detach()},
            means_t=logged(tokens, ratio_t, by_token(clipped_S, tokens, elsewhere=0.0)),
            peaks_t={"val/ratio_max": ratio_t},
        )


def by_token(values_S: Tensor, tokens: PolicyTokens, elsewhere: float) -> Tensor:
    """(t,): the value of the sequence that the token belongs to."""
    return F.pad(values_S, (0, 1), value=elsewhere)[tokens.sequence_t]
