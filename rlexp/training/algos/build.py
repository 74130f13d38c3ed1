"""Build the loss that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlexp.config.schema import losses as schema
from rlexp.training.algos.base import Loss
from rlexp.training.algos.pairs import PairLoss, RewardLoss
from rlexp.training.algos.policy import POLICY
from rlexp.training.algos.policy_loss import PolicyLoss
from rlexp.training.algos.unpaired import SFT, UnpairedLoss

LOSSES: dict[type[schema.LossConfig], Callable[[Any], Loss]] = {
    schema.PreferenceConfig: PairLoss,
    schema.UnpairedConfig: UnpairedLoss,
    schema.SFTConfig: SFT,
    schema.RewardModelConfig: RewardLoss,
}


def build_loss(cfg: schema.LossConfig) -> Loss:
    """Build the loss of the configuration's class, or of the nearest class that it inherits from."""
    return next(LOSSES[each] for each in type(cfg).__mro__ if each in LOSSES)(cfg)


def build_policy_loss(cfg: schema.PolicyLossConfig, importance_cap: float | None) -> PolicyLoss:
    return POLICY[type(cfg)](cfg, importance_cap)
