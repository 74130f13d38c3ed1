"""Rules for the losses of reinforcement learning, across their fields."""

from __future__ import annotations

import math

from rlexp.config.schema import (
    Config,
    CriticName,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KLEstimator,
    KLPlace,
    PolicyLossConfig,
    PPOConfig,
    RLOOConfig,
)
from rlexp.errors import ConfigError


def check_policy_loss(cfg: Config) -> None:
    """The values of a loss of reinforcement learning, and what they need of the rollout."""
    loss = cfg.loss
    if not isinstance(loss, PolicyLossConfig):
        return
    for key, zero in (("beta", True), ("entropy", True), ("clip_low", False), ("clip_high", False)):
        _over_zero(f"loss.{key}", getattr(loss, key), zero=zero)
    if loss.dual_clip is not None and not 1 < loss.dual_clip < math.inf:
        raise ConfigError(f"loss.dual_clip={loss.dual_clip}: must be greater than 1 (3 is usual), or null.")
    _check_divergence(loss)
    if isinstance(loss, GROUPED) and cfg.rollout.n_samples < 2:
        raise ConfigError(
            f"rollout.n_samples={cfg.rollout.n_samples}: loss={loss.name} holds an answer against others to the same "
            f"prompt, and one alone learns nothing. Use rollout.n_samples=2 or more, or loss=ppo or loss=reinforce_pp."
        )
    if loss.filter and cfg.rollout.n_samples < 2:
        raise ConfigError(
            f"rollout.n_samples={cfg.rollout.n_samples}: with loss.filter=true every answer would be left out, since "
            f"one alone scores as all do. Use rollout.n_samples=2 or more, or loss.filter=false."
        )
    if isinstance(loss, PPOConfig):
        _check_critic(cfg, loss)


GROUPED = (GRPOConfig, DrGRPOConfig, RLOOConfig, GSPOConfig)


def _check_divergence(loss: PolicyLossConfig) -> None:
    if loss.kl_target is not None:
        _over_zero("loss.kl_target", loss.kl_target)
        if loss.beta == 0:
            raise ConfigError(
                f"loss.kl_target={loss.kl_target}: moves loss.beta, which starts at 0 and would stay there. Give "
                f"loss.beta=0.05, or leave loss.kl_target out."
            )
    if loss.kl_horizon < 1:
        raise ConfigError(f"loss.kl_horizon={loss.kl_horizon}: must be at least 1 (samples).")
    if loss.beta > 0 and loss.kl_in is KLPlace.loss and loss.kl is KLEstimator.k1:
        raise ConfigError(
            "loss.kl=k1: with loss.kl_in=loss its gradient does not know the reference, and nothing would hold the "
            "policy to it. Use loss.kl=k3 or loss.kl=k2, or loss.kl_in=reward."
        )


def _check_critic(cfg: Config, loss: PPOConfig) -> None:
    for key in ("gamma", "lam"):
        value = getattr(loss, key)
        if not 0 <= value <= 1:
            raise ConfigError(f"loss.{key}={value}: must be in [0, 1].")
    _over_zero("loss.value_coef", loss.value_coef, zero=True)
    if loss.value_clip is not None:
        _over_zero("loss.value_clip", loss.value_clip)
    if loss.value_lr is not None:
        _over_zero("loss.value_lr", loss.value_lr, zero=True)
        if loss.value_lr and not cfg.optim.lr:
            raise ConfigError(
                f"loss.value_lr={loss.value_lr}: is reached as a multiple of optim.lr, and optim.lr=0 has none. Give "
                f"optim.lr a value, or leave loss.value_lr out; to train the critic alone, model.freeze=['*']."
            )
        if loss.critic is CriticName.shared:
            raise ConfigError(
                f"loss.value_lr={loss.value_lr}: loss.critic=shared has the policy's own layers, and they have one "
                f"rate, optim.lr. Leave loss.value_lr out, or use loss.critic=own."
            )


def _over_zero(key: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{key}={value}: must be {'at least' if zero else 'greater than'} 0.")
