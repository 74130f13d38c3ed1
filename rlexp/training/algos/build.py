"""Build the loss that a configuration names."""

from __future__ import annotations

from typing import Any

from rlexp.config.schema.loss_terms import loss_terms
from rlexp.config.schema.losses import (
    DPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    LossConfig,
    PolicyLossConfig,
    PPOConfig,
    PreferenceConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from rlexp.training.algos.base import Loss
from rlexp.training.algos.dpo import DPO
from rlexp.training.algos.dr_grpo import DrGRPO
from rlexp.training.algos.grpo import GRPO
from rlexp.training.algos.gspo import GSPO
from rlexp.training.algos.policy_loss import PolicyLoss
from rlexp.training.algos.ppo import PPO
from rlexp.training.algos.preference import Formula, Preference, Term
from rlexp.training.algos.reinforce_pp import ReinforcePP
from rlexp.training.algos.rloo import RLOO


def build_loss(cfg: LossConfig) -> Loss:
    match cfg:
        case PreferenceConfig(margin_weight=margin_weight):
            terms = [Term(term.name, term.weight, build_formula(term.cfg, margin_weight)) for term in loss_terms(cfg)]
            return Preference(terms, sft_weight=cfg.sft_weight, wpo=cfg.wpo, ld_alpha=cfg.ld_alpha)
        case _:
            raise AssertionError(cfg)


def build_formula(cfg: PreferenceConfig, margin_weight: float = 0.0) -> Formula:
    common: dict[str, Any] = {"beta": cfg.beta, "margin_weight": margin_weight}
    match cfg:
        case DPOConfig(label_smoothing=label_smoothing):
            return DPO(**common, label_smoothing=label_smoothing)
        case _:
            raise AssertionError(cfg)


def build_policy_loss(cfg: PolicyLossConfig, importance_cap: float | None) -> PolicyLoss:
    common: dict[str, Any] = {
        "beta": cfg.beta,
        "kl_in": cfg.kl_in,
        "kl": cfg.kl,
        "clip_low": cfg.clip_low,
        "clip_high": cfg.clip_high,
        "dual_clip": cfg.dual_clip,
        "entropy": cfg.entropy,
        "importance_cap": importance_cap,
    }
    match cfg:
        case PPOConfig(gamma=gamma, lam=lam, value_coef=value_coef, value_clip=value_clip):
            return PPO(**common, gamma=gamma, lam=lam, value_coef=value_coef, value_clip=value_clip)
        case GRPOConfig():
            return GRPO(**common)
        case DrGRPOConfig():
            return DrGRPO(**common)
        case RLOOConfig():
            return RLOO(**common)
        case ReinforcePPConfig():
            return ReinforcePP(**common)
        case GSPOConfig():
            return GSPO(**common)
        case _:
            raise AssertionError(cfg)
