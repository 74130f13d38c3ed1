"""PPO (Schulman et al. 2017, arXiv 1707.06347), as for language models in Ziegler et al. 2019 (arXiv 1909.08593)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.config.schema.losses import CriticName
from rlexp.training.algos.clipped import ClippedRatio
from rlexp.training.algos.gae import gae
from rlexp.training.algos.policy_loss import Outcomes, PolicyTerms, PolicyTokens, Spread
from rlexp.training.types import Wanted


@dataclass(frozen=True, kw_only=True)
class PPO(ClippedRatio):
    """Advantages of single tokens from a critic (GAE), the clipped ratio, and the critic's own loss.

    The critic's target is advantage + value, before the advantages are whitened. With policy = old, whitened advantages
    and loss.normalize=token, the policy's term is 0, their mean; its gradient is not 0. While the critic is unchanged,
    its term is half the mean square of the advantages before whitening.
    """

    gamma: float
    lam: float
    value_coef: float
    value_clip: float | None
    critic: CriticName = CriticName.own

    @property
    def wanted(self) -> Wanted:
        return super().wanted | Wanted(values=self.critic)

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:  # noqa: ARG002
        return outcomes.scores_N

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> Spread:
        assert values_L is not None
        advantages_L = gae(self.rewards(credit, kl_L, kl_coef), values_L, self.gamma, self.lam)
        return Spread(advantages_L, advantages_L + values_L.double())

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        """Add the critic's loss. `loss/value_avg` is logged without its coefficient, as TRL does."""
        terms = super().__call__(tokens, kl_coef)
        losses_n, clipped_n = self.value_losses(tokens)
        value = (tokens.weight_n * losses_n).sum()
        return replace(
            terms,
            loss=terms.loss + self.value_coef * value,
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
        if self.value_clip is None:
            return plain_n / 2, torch.zeros_like(plain_n)
        held_n = tokens.values_n.clamp(tokens.old_values_n - self.value_clip, tokens.old_values_n + self.value_clip)
        losses_n = torch.maximum(plain_n, (held_n - tokens.returns_n).square())
        return losses_n / 2, (losses_n != plain_n).detach().to(plain_n.dtype)
