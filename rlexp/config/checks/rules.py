"""Rules across fields as rows of a table, and the sentence that refuses a broken one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.bounds import as_typed


@dataclass(frozen=True)
class Check:
    key: str  # a key, or a group, which stands for its option
    broken: Callable[[Any], object]  # by a configuration
    says: str  # why, and what to do; `{train.batch_size}` is a value


def refuse_broken(rules: Iterable[Check], cfg: Config, **words: object) -> None:
    """Refuse a configuration by the first rule that it breaks: `key=value: why. What to do.` `words` are further values
    for these sentences."""
    for rule in rules:
        if rule.broken(cfg):
            value = attrgetter(rule.key)(cfg)
            typed = as_typed(getattr(value, "name", value))
            raise ConfigError(f"{rule.key}={typed}: {rule.says.format(**vars(cfg), **words)}")
