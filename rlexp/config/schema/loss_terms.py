"""The terms of a loss: one, or several with weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

from rlexp.base.errors import ConfigError
from rlexp.config.schema import KINDS
from rlexp.config.schema.bounds import as_typed, check_bounds
from rlexp.config.schema.keys import suggestion
from rlexp.config.schema.losses import ALL_MODIFIERS, LossConfig, MPOConfig, PreferenceConfig
from rlexp.config.schema.value_kinds import typed_entry

OF_THE_SUM = ("sft_weight", *ALL_MODIFIERS)  # keys of the whole loss, not of a term
TERMS = [
    name
    for name, kind in KINDS["loss"].items()
    if issubclass(kind, PreferenceConfig) and not issubclass(kind, MPOConfig)
]
A_SUM = "'loss.terms=[{loss: dpo, weight: 0.8}, {loss: bco_pair, weight: 0.2}]'"


@dataclass(frozen=True)
class LossTerm:
    name: str
    weight: float
    cfg: PreferenceConfig


def loss_terms(loss: PreferenceConfig) -> list[LossTerm]:
    """Return the terms of a sum, or the single loss as one term."""
    if not isinstance(loss, MPOConfig):
        return [LossTerm(loss.name, 1.0, loss)]
    if not loss.terms:
        raise ConfigError(f"loss.terms=[]: has no term, and loss={loss.name} adds its terms up. For example: {A_SUM}.")
    terms = [_term(loss, f"loss.terms.{place}", keys) for place, keys in enumerate(loss.terms)]
    names = [term.name for term in terms]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"loss.terms.{place}.loss={name}: stands in the list twice. Give it once, with both weights added up."
            )
    if not any(term.weight for term in terms):
        raise ConfigError(
            f"loss.terms={loss.terms}: all weights are 0, so no answers would be compared. Give at least one term a "
            f"weight above 0."
        )
    return [term for term in terms if term.weight]


def compares(loss: LossConfig) -> bool:
    """Return whether the policy is compared with a reference model, in some term."""
    match loss:
        case PreferenceConfig():
            return any(term.cfg.compares for term in loss_terms(loss))
        case _:
            return loss.compares


def _term(loss: MPOConfig, key: str, keys: Any) -> LossTerm:
    if not isinstance(keys, dict):
        raise ConfigError(f"{key}={keys}: must be a group of keys. For example: {A_SUM}.")
    name = keys.get("loss")
    if name == "sft":
        raise ConfigError(f"{key}.loss=sft: the likelihood of the chosen answers is not a term. Use loss.sft_weight.")
    if name not in TERMS:
        why = f"{key}.loss={name}: no such loss over pairs.{suggestion(str(name), TERMS)}" if name else (
            f"{key}.loss: is missing.")  # fmt: skip
        raise ConfigError(f"{why} Losses: {', '.join(TERMS)}.")
    own = {str(leaf): value for leaf, value in keys.items() if leaf not in ("loss", "weight")}
    for leaf, value in own.items():
        if leaf == "sft_weight":
            raise ConfigError(
                f"{key}.{leaf}={as_typed(value)}: belongs to the whole loss, and not to a term. Use loss.{leaf}."
            )
        if leaf in OF_THE_SUM:
            raise ConfigError(f"{key}.{leaf}={as_typed(value)}: has no meaning in a sum of losses. Leave it out.")
    kind: type[PreferenceConfig] = KINDS["loss"][name]
    shared = {} if kind.own_beta() else {"beta": loss.beta}
    cfg = cast(
        PreferenceConfig,
        typed_entry(key, kind, shared | own, f"loss={name}", ("loss", "weight"), OF_THE_SUM),
    )
    check_bounds(cfg, f"{key}.")
    cfg.sft_weight = 0.0  # ORPO's and CPO's own default: here it is loss.sft_weight alone
    weight = keys.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= sys.float_info.max:
        typed = as_typed(weight)
        raise ConfigError(f"{key}.weight={typed}: must be a number, at least 0. For example: {key}.weight=1.0.")
    return LossTerm(name, float(weight), cfg)
