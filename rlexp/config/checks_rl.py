"""Rules across the fields of rollouts, rewards and the losses they serve."""

from __future__ import annotations

from rlexp.config.schema import Config, PolicyLossConfig


def is_policy_loss(cfg: Config) -> bool:
    """Whether the run draws its own samples."""
    return isinstance(cfg.loss, PolicyLossConfig)
