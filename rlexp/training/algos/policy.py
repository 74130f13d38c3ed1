"""The algorithms of reinforcement learning; `POLICY` lists them all. They share a clipped ratio, divergence and entropy
in the loss, and metrics. At the end: how the divergence is estimated, and what adapts its coefficient.

    ratio = exp(log π − log π_old),  loss = max(−A·ratio, −A·clamp(ratio, 1 − clip_low, 1 + clip_high))

With policy = old the ratio is 1 and nothing is clipped. The loss of a token is −A and its gradient is −A·∇log π, as in
REINFORCE. Shape letters: n tokens of answers on this rank, S sequences of a micro-batch, N samples of a rollout, L
tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import losses as schema
from rlexp.training.algos.advantages import centred, gae, returns_to_go, token_rewards
from rlexp.training.algos.policy_loss import Outcomes, PolicyTerms, PolicyTokens, TokenAdvantages
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class ClippedRatio:
    """Base class. A subclass overrides what differs, such as what an answer has earned (`credit`)."""

    cfg: Any  # the keys of the algorithm
    importance_cap: float | None  # bound of exp(old − behaviour), a factor of the policy's term; None: no such factor

    @property
    def wanted(self) -> Wanted:
        return Wanted(reference=self.cfg.beta > 0, entropies=True, entropy_gradient=self.cfg.entropy > 0, decoding=True)

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:  # noqa: ARG002
        return outcomes.scores_N

    def rewards(self, score: float, kl_L: Tensor, kl_coef: float) -> Tensor:
        """Return the score token by token, (L,), less the price of the divergence if that is part of the reward."""
        return token_rewards(score, kl_L, kl_coef if self.cfg.kl_in is schema.KLPlace.reward else 0.0)

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> TokenAdvantages:  # noqa: ARG002
        """Give every token of an answer the credit of the whole answer."""
        return TokenAdvantages(torch.full_like(kl_L, credit, dtype=torch.float64))

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
        losses = torch.maximum(plain, -advantages * ratio.clamp(1 - self.cfg.clip_low, 1 + self.cfg.clip_high))
        if self.cfg.dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * self.cfg.dual_clip), losses)
        return losses, (losses != plain).detach().to(ratio.dtype)

    def importance(self, log_ratio: Tensor) -> Tensor | float:
        """Return the importance weight of each token (or sequence): exp(log_ratio), capped; 1 without a cap."""
        return 1.0 if self.importance_cap is None else log_ratio.exp().clamp(max=self.importance_cap)

    def other_terms(self, tokens: PolicyTokens, kl_coef: float) -> dict[str, Tensor]:
        """Return the terms of divergence and entropy as they enter the loss."""
        terms = {}
        if self.wanted.reference and self.cfg.kl_in is schema.KLPlace.loss:
            assert tokens.reference_n is not None
            kl_n = estimate(self.cfg.kl, tokens.logps_n - tokens.reference_n)
            terms["loss/kl"] = kl_coef * (tokens.weight_n * kl_n).sum()
        if self.wanted.entropy_gradient:
            terms["loss/entropy"] = -self.cfg.entropy * (tokens.weight_n * tokens.entropy_n).sum()
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
        values_n["policy/kl_avg"] = estimate(schema.KLEstimator.k3, tokens.logps_n - tokens.reference_n)
    return {name: each.detach() for name, each in values_n.items()}


def by_group(values_N: Tensor, group_N: Tensor, credit: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `credit` to the values of each group, and return the results in the order of `values_N`."""
    order_N = torch.argsort(group_N, stable=True)
    sizes = torch.unique_consecutive(group_N[order_N], return_counts=True)[1].tolist()
    result_N = torch.empty_like(values_N)
    result_N[order_N] = torch.cat([credit(each) for each in values_N[order_N].split(sizes)])
    return result_N


@dataclass(frozen=True)
class PPO(ClippedRatio):
    """Advantages of single tokens from a critic (GAE), the clipped ratio, and the critic's own loss.

    The critic's target is advantage + value, before the advantages are whitened. With policy = old, whitened advantages
    and loss.normalize=token, the policy's term is 0, their mean; its gradient is not 0. While the critic is unchanged,
    its term is half the mean square of the advantages before whitening. Schulman et al. 2017 (arXiv 1707.06347), as for
    language models in Ziegler et al. 2019 (arXiv 1909.08593).
    """

    @property
    def wanted(self) -> Wanted:
        return super().wanted | Wanted(values=self.cfg.critic)

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> TokenAdvantages:
        assert values_L is not None
        advantages_L = gae(self.rewards(credit, kl_L, kl_coef), values_L, self.cfg.gamma, self.cfg.lam)
        return TokenAdvantages(advantages_L, advantages_L + values_L.double())

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        """Add the critic's loss. `loss/value_avg` is logged without its coefficient, as TRL does."""
        terms = super().__call__(tokens, kl_coef)
        losses_n, clipped_n = self.value_losses(tokens)
        value = (tokens.weight_n * losses_n).sum()
        return replace(
            terms,
            loss=terms.loss + self.cfg.value_coef * value,
            weighted=terms.weighted | {"loss/value_avg": value.detach()},
            means_n=terms.means_n | {"val/clipfrac_avg": clipped_n},
        )

    def value_losses(self, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        """Return each token's value loss, and 1.0 where clipping decides it, else 0.0.

        The loss is half the larger of two squared errors: that of the value, and that of the value held within
        `value_clip` of the old one.
        """
        assert tokens.values_n is not None
        assert tokens.old_values_n is not None
        assert tokens.returns_n is not None
        plain_n = (tokens.values_n - tokens.returns_n).square()
        if self.cfg.value_clip is None:
            return plain_n / 2, torch.zeros_like(plain_n)
        held_n = tokens.values_n.clamp(
            tokens.old_values_n - self.cfg.value_clip, tokens.old_values_n + self.cfg.value_clip
        )
        losses_n = torch.maximum(plain_n, (held_n - tokens.returns_n).square())
        return losses_n / 2, (losses_n != plain_n).detach().to(plain_n.dtype)


EPS = 1e-4  # added to a group's deviation, as TRL does


@dataclass(frozen=True)
class GRPO(ClippedRatio):
    """Advantage: (score − mean) / (deviation + 1e-4), within the answers to one prompt; the deviation is unbiased.

    With policy = old and loss.normalize=sequence, the policy's term is minus the mean advantage, which is 0 when the
    train batch holds whole groups. Two answers that score 0 and 1 have the advantages ∓0.7070. Shao et al. 2024
    (DeepSeekMath, arXiv 2402.03300).
    """

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        scores_N = outcomes.scores_N
        if self.cfg.kl_in is schema.KLPlace.reward:  # less the price of each whole answer's divergence
            scores_N = scores_N - kl_coef * outcomes.kl_N
        return by_group(scores_N, outcomes.group_N, self.compared)

    def compared(self, values: Tensor) -> Tensor:
        """Return the advantages of the answers to one prompt."""
        distances = centred(values)
        deviation = (distances.square().sum() / max(1, len(values) - 1)).sqrt()
        return distances / (deviation + EPS)


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Advantage: score − mean, within the answers to one prompt.

    It leaves out two divisors of GRPO. The deviation favours prompts whose answers score nearly alike. An answer's own
    length favours long wrong answers; loss.normalize=fixed leaves it out. With policy = old the gradient is that of
    REINFORCE with the group's mean as baseline, divided by answers × rollout.max_new_tokens. Two answers that score 0
    and 1 have the advantages ∓½. Liu et al. 2025 (Understanding R1-Zero-Like Training, arXiv 2503.20783).
    """

    def compared(self, values: Tensor) -> Tensor:
        return centred(values)


@dataclass(frozen=True)
class RLOO(GRPO):
    """Advantage: score − β·divergence, less the mean of the same over the *other* answers to the prompt.

    It equals n / (n − 1) times the distance from the mean of all n answers. With policy = old the gradient is −A·∇log
    π(answer): there a ratio for each token and a ratio for the whole answer (as in TRL) agree. After the first step the
    ratio of each token is clipped. Two answers that score 0 and 1 have the advantages ∓1. Ahmadian et al. 2024 (Back to
    Basics, arXiv 2402.14740); Kool et al. 2019.
    """

    def compared(self, values: Tensor) -> Tensor:
        return centred(values) * (len(values) / max(1, len(values) - 1))


@dataclass(frozen=True)
class ReinforcePP(ClippedRatio):
    """Advantage of a token: the score, less the price of its own and all later tokens' divergence.

    There is no critic and no group: loss.whiten makes the mean of the train batch the baseline. With policy = old,
    loss.whiten and loss.normalize=token, the policy's term is 0 and its gradient is that of REINFORCE. Hu et al. 2025
    (REINFORCE++, arXiv 2501.03262).
    """

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> TokenAdvantages:  # noqa: ARG002
        return TokenAdvantages(returns_to_go(self.rewards(credit, kl_L, kl_coef)))


@dataclass(frozen=True)
class GSPO(GRPO):
    """GRPO's advantages, with one ratio for the whole answer: exp(mean over its tokens of log π − log π_old).

    The policy's term is a mean over answers, and the clipping range a thousandth of GRPO's. With policy = old its value
    and gradient are those of GRPO with loss.normalize=sequence. Divergence and entropy stay terms of single tokens. The
    importance weight of an answer is a mean over its tokens too. Zheng et al. 2025 (Group Sequence Policy Optimization,
    arXiv 2507.18071).
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
        ratio_n = ratio_S.detach()[tokens.sequence_n]  # that of its sequence, for each token
        return PolicyTerms(
            loss=policy + sum(others.values()),
            weighted={name: term.detach() for name, term in others.items()},
            replicated={"loss/policy_avg": policy.detach()},
            means_n=logged(tokens, ratio_n, clipped_S[tokens.sequence_n]),
            peaks_n={"val/ratio_max": ratio_n},
        )


POLICY: dict[type[schema.PolicyLossConfig], type[ClippedRatio]] = {
    schema.PPOConfig: PPO,
    schema.GRPOConfig: GRPO,
    schema.DrGRPOConfig: DrGRPO,
    schema.RLOOConfig: RLOO,
    schema.ReinforcePPConfig: ReinforcePP,
    schema.GSPOConfig: GSPO,
}


def estimate(kind: schema.KLEstimator, d: Tensor) -> Tensor:
    """Return the estimate of each token's divergence, a function of its log-ratio d = policy − reference (Schulman,
    joschu.net/blog/kl-approx.html); it is differentiable.

    Over tokens that the policy draws, the mean of k1 and of k3 is the divergence, and that of k2 nearly so. In the loss
    only the gradient matters: that of k1 does not depend on the reference and is zero in the mean, that of k2 is d·∇log
    π.
    """
    match kind:
        case schema.KLEstimator.k1:
            return d
        case schema.KLEstimator.k2:
            return d * d / 2
        case schema.KLEstimator.k3:
            return torch.expm1(-d) + d  # near 0, exp(−d) − 1 + d would keep none of its digits


MOST_CHANGE = 0.2  # of the coefficient after one rollout, relatively


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
        error = min(max(kl / self.target - 1, -MOST_CHANGE), MOST_CHANGE)
        self.beta *= 1 + error * min(1.0, samples / self.horizon)  # without min() beta could turn negative
