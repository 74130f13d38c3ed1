"""The terms of a reward: one, or several with weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, cast

from omegaconf import MISSING

from rlexp.base.errors import ConfigError
from rlexp.config.schema import KINDS
from rlexp.config.schema.keys import suggestion
from rlexp.config.schema.rollouts import RewardConfig, SumRewardConfig
from rlexp.config.schema.value_kinds import typed_entry

KINDS_OF_TERMS = {name: kind for name, kind in KINDS["reward"].items() if kind is not SumRewardConfig}


@dataclass
class TermConfig:
    """Keys that a term has besides those of its kind."""

    kind: str = MISSING  # the kind of the reward: rule, python or model; the term has the keys of reward=KIND too
    weight: float = 1.0  # multiplies the term's score in the sum


TERM_KEYS = tuple(field.name for field in fields(TermConfig))


@dataclass(frozen=True)
class RewardTerm:
    """One term. Its keys stand below `key`: `reward`, or `reward.terms.NAME`."""

    name: str
    weight: float
    key: str
    cfg: RewardConfig


def reward_terms(cfg: RewardConfig) -> list[RewardTerm]:
    """Return the terms of a sum, or the single reward as one term named by its kind."""
    if not isinstance(cfg, SumRewardConfig):
        return [RewardTerm(cfg.name, 1.0, "reward", cfg)]
    if not cfg.terms:
        raise ConfigError(
            "reward.terms: has no value, and reward=sum adds its terms up. Give at least one, as in "
            "'reward.terms.NAME={kind: rule, weight: 1.0, rule: length}'."
        )
    return [_term(str(name), keys) for name, keys in cfg.terms.items()]


def _term(name: str, keys: Any) -> RewardTerm:
    key = f"reward.terms.{name}"
    if not isinstance(keys, dict):
        raise ConfigError(
            f"{key}={keys}: must be a group of keys. For example: {key}={{kind: rule, weight: 1.0, rule: length}}."
        )
    kind = keys.get("kind")
    kinds = list(KINDS_OF_TERMS)
    if kind not in KINDS_OF_TERMS:
        why = f"{key}.kind={kind}: no such kind.{suggestion(str(kind), kinds)}" if kind else f"{key}.kind: is missing."
        raise ConfigError(f"{why} Kinds: {', '.join(kinds)}.")
    own = {str(leaf): value for leaf, value in keys.items() if leaf not in TERM_KEYS}
    cfg = typed_entry(key, KINDS_OF_TERMS[kind], own, f"a reward of kind {kind}", TERM_KEYS)
    weight = keys.get("weight", TermConfig.weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight={weight}: must be a number. For example: {key}.weight=1.0.")
    return RewardTerm(name, float(weight), key, cast(RewardConfig, cfg))
