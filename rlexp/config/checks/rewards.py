"""Rules across the fields of rewards."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from rlexp.base.errors import ConfigError
from rlexp.config.checks.files import check_model_path
from rlexp.config.schema import Config
from rlexp.config.schema.bounds import check_bounds
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, PythonRewardConfig, RewardConfig, RuleName, RuleRewardConfig


def check_reward(cfg: Config) -> None:
    """Check each term by the rules of its kind. The data's answers are checked when the first one is scored."""
    if not cfg.loss.draws:
        return
    if type(cfg.reward) is RewardConfig:
        raise ConfigError(
            f"reward: has no value, and loss={cfg.loss.name} learns from one. Say reward=rule, reward=python, "
            f"reward=model or reward=sum."
        )
    for term in reward_terms(cfg.reward):
        check_bounds(term.cfg, f"{term.key}.")
        match term.cfg:
            case RuleRewardConfig() as rule:
                _check_rule(term.key, rule)
            case PythonRewardConfig() as python:
                _check_function(term.key, python)
            case ModelRewardConfig() as model:
                check_model_path(f"{term.key}.path", model.path)


def _check_rule(key: str, cfg: RuleRewardConfig) -> None:
    if cfg.rule is RuleName.count and not cfg.text:
        raise ConfigError(
            f"{key}.text: has no value, and {key}.rule=count counts how often it occurs. Give {key}.text=TEXT, or "
            f"another {key}.rule."
        )
    if cfg.rule is not RuleName.regex:
        return
    if not cfg.pattern:
        raise ConfigError(f"{key}.pattern: has no value, and {key}.rule=regex looks for it. Give {key}.pattern=REGEX.")
    try:
        re.compile(cfg.pattern)
    except re.error as error:
        raise ConfigError(
            f"{key}.pattern={cfg.pattern}: is no regular expression ({error.msg} at character {(error.pos or 0) + 1}). "
            f"Give another, and quote it on the command line."
        ) from None


def _check_function(key: str, cfg: PythonRewardConfig) -> None:
    module, colon, function = cfg.function.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise ConfigError(
            f"{key}.function={cfg.function}: must be a module and a function in it. For example: "
            f"{key}.function=package.module:function."
        )
    missing = _first_missing(module)
    if missing:
        raise ConfigError(
            f"{key}.function={cfg.function}: there is no module {missing}. Give one that is in {Path.cwd()}, "
            f"or where Python finds its modules."
        )


def _first_missing(module: str) -> str | None:
    """Return the first part of a dotted name that is not found. Nothing is imported: that would run the user's code."""
    parts = module.split(".")
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        spec = PathFinder.find_spec(name, path) if path is not None else None
        if spec is None and number == 1:  # in no folder: built in, or installed in editable mode
            with contextlib.suppress(ValueError):  # __main__ has none
                spec = importlib.util.find_spec(name)
        if spec is None:
            return name
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return None
