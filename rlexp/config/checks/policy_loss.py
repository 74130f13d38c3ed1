"""Rules across the fields of losses of reinforcement learning."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.losses import (
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


def check_policy_loss(cfg: Config, loss: PolicyLossConfig) -> None:
    """Refuse values that do not fit together, or do not fit the rollout."""
    _check_divergence(loss)
    if isinstance(loss, GROUPED) and cfg.rollout.n_samples < 2:
        raise ConfigError(
            f"rollout.n_samples={cfg.rollout.n_samples}: loss={loss.name} compares an answer with others to the same "
            f"prompt, and one alone learns nothing. Use rollout.n_samples=2 or more, or loss=ppo or loss=reinforce_pp."
        )
    if loss.filter and cfg.rollout.n_samples < 2:
        raise ConfigError(
            f"rollout.n_samples={cfg.rollout.n_samples}: with loss.filter=true every answer would be left out, since a "
            f"prompt with one answer has one score. Use rollout.n_samples=2 or more, or loss.filter=false."
        )
    if isinstance(loss, PPOConfig):
        _check_critic(cfg, loss)


GROUPED = (GRPOConfig, DrGRPOConfig, RLOOConfig, GSPOConfig)


def _check_divergence(loss: PolicyLossConfig) -> None:
    if loss.kl_target is not None and loss.beta == 0:
        raise ConfigError(
            f"loss.kl_target={loss.kl_target}: adapts loss.beta, which starts at 0 and would stay there. Give "
            f"loss.beta=0.05, or leave loss.kl_target out."
        )
    if loss.beta > 0 and loss.kl_in is KLPlace.loss and loss.kl is KLEstimator.k1:
        raise ConfigError(
            "loss.kl=k1: with loss.kl_in=loss its gradient does not depend on the reference, so nothing would hold "
            "the policy near it. Use loss.kl=k3 or loss.kl=k2, or loss.kl_in=reward."
        )


def _check_critic(cfg: Config, loss: PPOConfig) -> None:
    if loss.value_lr is not None:
        if loss.value_lr and not cfg.optim.lr:
            raise ConfigError(
                f"loss.value_lr={loss.value_lr}: is applied as a multiple of optim.lr, and optim.lr is 0. Give "
                f"it another value, or leave loss.value_lr out; to train only the critic, use model.freeze=['*']."
            )
        if loss.critic is CriticName.shared:
            raise ConfigError(
                f"loss.value_lr={loss.value_lr}: loss.critic=shared uses the policy's layers, and they have one "
                f"learning rate, optim.lr. Leave loss.value_lr out, or use loss.critic=own."
            )
