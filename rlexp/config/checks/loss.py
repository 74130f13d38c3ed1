"""Rules across the fields of a loss: each family has its own."""

from __future__ import annotations

from rlexp.config.checks.policy_loss import check_policy_loss
from rlexp.config.checks.preference import check_preference
from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig, PreferenceConfig


def check_loss(cfg: Config) -> None:
    match cfg.loss:
        case PolicyLossConfig() as loss:
            check_policy_loss(cfg, loss)
        case PreferenceConfig() as loss:
            check_preference(loss)
