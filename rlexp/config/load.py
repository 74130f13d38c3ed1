"""The door: from Hydra's DictConfig, or a run's config.yaml, to one typed object. Nothing deeper sees yaml."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from rlexp.config import launchers, resolvers, schema
from rlexp.config.checks import check
from rlexp.config.keys import about_unknown, all_keys
from rlexp.config.paths import conf_dir
from rlexp.config.schema import KINDS, Config
from rlexp.errors import ConfigError

_OPEN = re.compile(
    r"(engine\.overrides|logger\.axes|reward\.terms|hydra\.launcher\.(environment|additional_parameters))[.=]"
)


@functools.cache
def register() -> None:
    """Schema and resolvers; must run before Hydra composes."""
    schema.register()
    launchers.register()
    resolvers.register()


def compose_config(overrides: Sequence[str]) -> Config:
    """What `python -m rlexp OVERRIDES` would run, for programs and tests."""
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return from_hydra(compose("config", overrides=open_ended(overrides)))


def open_ended(overrides: Sequence[str]) -> list[str]:
    """`engine.overrides.KEY=VALUE` as it is typed: Hydra wants a sign before a key that is not there yet."""
    return [f"++{each}" if _OPEN.match(each) else each for each in overrides]


def from_hydra(cfg: DictConfig, *, here: bool = True) -> Config:
    """Resolve, convert and check a composed configuration; `here` is whether this machine is to run it."""
    _refuse_unknown(cfg)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]}: has no value. Give it on the command line: {missing[0]}=VALUE.")
    typed = cast(Config, OmegaConf.to_object(cfg))
    check(typed, here=here)
    return typed


def _refuse_unknown(cfg: DictConfig) -> None:
    """`+key=value` adds what the schema does not have, and Hydra lets it. It would do nothing, in silence."""
    keys = all_keys()
    for top in map(str, cfg):
        if top not in keys:
            raise ConfigError(about_unknown(top))
        node = cfg._get_node(top)
        if not isinstance(node, DictConfig):
            continue
        if top in KINDS and not OmegaConf.is_missing(node, "name") and node.name not in KINDS[top]:
            options = ", ".join(KINDS[top])
            raise ConfigError(f"{top}.name={node.name}: is set by choosing {top}=OPTION. Options: {options}.")
        for leaf in map(str, node):
            name = f"{top}.{leaf}"
            if name not in keys or (keys[name] and f"{top}={node.name}" not in keys[name]):
                raise ConfigError(about_unknown(name))


def from_file(path: Path) -> Config:
    """Read what `to_file` wrote, by the same schema."""
    return from_plain(OmegaConf.load(path))


def from_plain(plain: Any) -> Config:
    """The typed object again, from what `to_plain` made of it."""
    plain = OmegaConf.create(plain)
    base = OmegaConf.structured(Config)
    for group, kinds in KINDS.items():
        base[group] = OmegaConf.structured(kinds[plain[group].name])
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(base, plain)))


def to_file(cfg: Config, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")  # at once or not at all: others may be reading
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)), encoding="utf-8")
    os.replace(temporary, path)


def to_plain(cfg: Config) -> dict[str, Any]:
    """Nested dicts of plain values (enums by name), for sinks and files."""
    container = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    return cast(dict[str, Any], container)
