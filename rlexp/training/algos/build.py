"""Build the loss that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlexp.config.schema.loss_terms import loss_terms
from rlexp.config.schema.losses import (
    AOTConfig,
    AOTUnpairedConfig,
    APODownConfig,
    APOZeroConfig,
    APOZeroUnpairedConfig,
    BCOConfig,
    BCOPairConfig,
    CPOConfig,
    DiscoPOPConfig,
    DPOConfig,
    DPONormConfig,
    DrGRPOConfig,
    EXOPairConfig,
    GRPOConfig,
    GSPOConfig,
    HingeConfig,
    IPOConfig,
    KTOConfig,
    LossConfig,
    NCAPairConfig,
    ORPOConfig,
    PolicyLossConfig,
    PPOConfig,
    PreferenceConfig,
    ReinforcePPConfig,
    RewardModelConfig,
    RLOOConfig,
    RobustConfig,
    SFTConfig,
    SimPOConfig,
    SPPOHardConfig,
    UnpairedConfig,
)
from rlexp.training.algos.aot import AOT, AOTUnpaired
from rlexp.training.algos.apo import APODown, APOZero, APOZeroUnpaired
from rlexp.training.algos.base import Loss
from rlexp.training.algos.bco import BCO
from rlexp.training.algos.bco_pair import BCOPair
from rlexp.training.algos.bradley_terry import BradleyTerry
from rlexp.training.algos.cpo import CPO
from rlexp.training.algos.discopop import DiscoPOP
from rlexp.training.algos.dpo import DPO
from rlexp.training.algos.dpo_norm import DPONorm
from rlexp.training.algos.dr_grpo import DrGRPO
from rlexp.training.algos.exo_pair import EXOPair
from rlexp.training.algos.grpo import GRPO
from rlexp.training.algos.gspo import GSPO
from rlexp.training.algos.hinge import Hinge
from rlexp.training.algos.ipo import IPO
from rlexp.training.algos.kto import KTO
from rlexp.training.algos.nca_pair import NCAPair
from rlexp.training.algos.orpo import ORPO
from rlexp.training.algos.policy_loss import PolicyLoss
from rlexp.training.algos.ppo import PPO
from rlexp.training.algos.preference import Formula, Preference, Term
from rlexp.training.algos.reinforce_pp import ReinforcePP
from rlexp.training.algos.rloo import RLOO
from rlexp.training.algos.robust import Robust
from rlexp.training.algos.sft import SFT
from rlexp.training.algos.simpo import SimPO
from rlexp.training.algos.sppo_hard import SPPOHard
from rlexp.training.algos.unpaired import Unpaired

LOSSES: dict[type[LossConfig], Callable[[Any], Loss]] = {}  # of one's own


def build_loss(cfg: LossConfig) -> Loss:
    if type(cfg) in LOSSES:
        return LOSSES[type(cfg)](cfg)
    match cfg:
        case PreferenceConfig(margin_weight=margin_weight):
            terms = [Term(term.name, term.weight, build_formula(term.cfg, margin_weight)) for term in loss_terms(cfg)]
            return Preference(terms, sft_weight=cfg.sft_weight, wpo=cfg.wpo, ld_alpha=cfg.ld_alpha)
        case UnpairedConfig():
            return build_unpaired(cfg)
        case SFTConfig():
            return SFT()
        case RewardModelConfig(margin_weight=margin_weight, center=center):
            return BradleyTerry(margin_weight, center)
        case _:
            raise AssertionError(cfg)


def build_unpaired(cfg: UnpairedConfig) -> Unpaired:
    common: dict[str, Any] = {
        "beta": cfg.beta,
        "desirable_weight": cfg.desirable_weight,
        "undesirable_weight": cfg.undesirable_weight,
    }
    match cfg:
        case KTOConfig():
            return KTO(**common)
        case BCOConfig(shift=shift):
            return BCO(**common, shift=shift)
        case APOZeroUnpairedConfig():
            return APOZeroUnpaired(**common)
        case _:
            raise AssertionError(cfg)


def build_formula(cfg: PreferenceConfig, margin_weight: float = 0.0) -> Formula:
    common: dict[str, Any] = {"beta": cfg.beta, "margin_weight": margin_weight}
    match cfg:
        case DPOConfig(label_smoothing=label_smoothing):
            return DPO(**common, label_smoothing=label_smoothing)
        case DPONormConfig(label_smoothing=label_smoothing):
            return DPONorm(**common, label_smoothing=label_smoothing)
        case IPOConfig(normalize=normalize):
            return IPO(**common, normalize=normalize)
        case APOZeroConfig():
            return APOZero(**common)
        case APODownConfig():
            return APODown(**common)
        case SimPOConfig(gamma=gamma):
            return SimPO(**common, gamma=gamma)
        case ORPOConfig():
            return ORPO(**common)
        case CPOConfig(label_smoothing=label_smoothing):
            return CPO(**common, label_smoothing=label_smoothing)
        case BCOPairConfig(shift=shift):
            return BCOPair(**common, shift=shift)
        case HingeConfig():
            return Hinge(**common)
        case RobustConfig(label_smoothing=label_smoothing):
            return Robust(**common, label_smoothing=label_smoothing)
        case AOTUnpairedConfig(label_smoothing=label_smoothing):  # an AOTConfig too
            return AOTUnpaired(**common, label_smoothing=label_smoothing)
        case AOTConfig(label_smoothing=label_smoothing):
            return AOT(**common, label_smoothing=label_smoothing)
        case EXOPairConfig(label_smoothing=label_smoothing):
            return EXOPair(**common, label_smoothing=label_smoothing)
        case NCAPairConfig():
            return NCAPair(**common)
        case SPPOHardConfig():
            return SPPOHard(**common)
        case DiscoPOPConfig(tau=tau):
            return DiscoPOP(**common, tau=tau)
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
        case PPOConfig(gamma=gamma, lam=lam, value_coef=value_coef, value_clip=value_clip, critic=critic):
            of_values: dict[str, Any] = {"value_coef": value_coef, "value_clip": value_clip, "critic": critic}
            return PPO(**common, gamma=gamma, lam=lam, **of_values)
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
