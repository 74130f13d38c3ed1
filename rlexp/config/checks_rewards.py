"""Rules for rewards, across their fields."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rlexp.config import sizes
from rlexp.config.checks_rollout import is_policy_loss
from rlexp.config.rewards import reward_terms
from rlexp.config.schema import (
    Config,
    ModelRewardConfig,
    PythonRewardConfig,
    RewardConfig,
    RuleName,
    RuleRewardConfig,
)
from rlexp.errors import ConfigError


def check_reward(cfg: Config) -> None:
    """Each term by the rules of its kind; what is wrong with the data's answers is seen when the first is judged."""
    if not is_policy_loss(cfg):
        return
    if type(cfg.reward) is RewardConfig:
        raise ConfigError(
            f"reward: has no value, and loss={cfg.loss.name} learns from one. Say reward=rule, reward=python, "
            f"reward=model or reward=sum."
        )
    for term in reward_terms(cfg.reward):
        match term.cfg:
            case RuleRewardConfig() as rule:
                _check_rule(term.key, rule)
            case PythonRewardConfig() as python:
                _check_function(term.key, python)
            case ModelRewardConfig() as model:
                _check_model(term.key, model)


def _check_rule(key: str, cfg: RuleRewardConfig) -> None:
    match cfg.rule:
        case RuleName.count:
            if not cfg.text:
                raise ConfigError(
                    f"{key}.text: has no value, and {key}.rule=count counts how often it occurs. Give {key}.text=TEXT, "
                    f"or another {key}.rule."
                )
            sizes.positive(f"{key}.most", cfg.most)
        case RuleName.length:
            sizes.positive(f"{key}.target", cfg.target)
        case RuleName.regex:
            if not cfg.pattern:
                raise ConfigError(f"{key}.pattern: has no value, and {key}.rule=regex looks for it.")
            try:
                re.compile(cfg.pattern)
            except re.error as error:
                raise ConfigError(
                    f"{key}.pattern={cfg.pattern}: is no regular expression ({error.msg} at character "
                    f"{(error.pos or 0) + 1})."
                ) from None


def _check_function(key: str, cfg: PythonRewardConfig) -> None:
    sizes.positive(f"{key}.workers", cfg.workers)
    if not math.isfinite(cfg.timeout_seconds) or cfg.timeout_seconds <= 0:
        raise ConfigError(f"{key}.timeout_seconds={cfg.timeout_seconds}: must be greater than 0.")
    module, colon, function = cfg.function.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise ConfigError(
            f"{key}.function={cfg.function}: must be a module and a function in it, as in package.module:function."
        )
    missing = _first_missing(module)
    if missing:
        raise ConfigError(
            f"{key}.function={cfg.function}: there is no module {missing}. Modules are looked for in {Path.cwd()} and "
            f"where python finds others."
        )


def _first_missing(module: str) -> str | None:
    """The first part of a dotted name that is not found. Nothing is imported, which would run the user's code here."""
    parts = module.split(".")
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        spec = PathFinder.find_spec(name, path) if path is not None else None
        if spec is None and number == 1:
            spec = _top_level(name)
        if spec is None:
            return name
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return None


def _top_level(name: str) -> ModuleSpec | None:
    """Also what comes by other ways than folders: built in, or installed to be edited."""
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # __main__ has none
        return None


def _check_model(key: str, cfg: ModelRewardConfig) -> None:
    if cfg.max_length is not None and cfg.max_length < 2:
        raise ConfigError(f"{key}.max_length={cfg.max_length}: must be at least 2 (a prompt and an answer).")
    looks_local = cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") > 1
    if looks_local and not Path(cfg.path).expanduser().is_dir():
        raise ConfigError(f"{key}.path={cfg.path}: no such folder. Give a model's folder, or a hub name.")
