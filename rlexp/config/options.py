"""The options of the groups in `conf/`, as a command line may choose them, and texts as Hydra reads them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.errors import ConfigError
from rlexp.config.paths import conf_dir, experiments
from rlexp.config.schema.keys import MEANT, PAGE, THEIRS, all_keys, suggestion
from rlexp.config.schema.value_kinds import is_list

EMPTY = "''"
MOST_DIGITS = 4300  # Python converts no longer ones
PLUGINS = ("hydra/launcher", "hydra/sweeper")  # groups of Hydra's own
# python -m rlexp.NAME
COMMANDS = {path.parent.name for path in Path(__file__).resolve().parents[1].glob("*/__main__.py")}
FLAGS = (  # of Hydra, and ours
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
APPENDED = ("experiment",)  # the one folder of conf/ that is in no defaults list


def refuse_wrong_option(argument: str) -> None:
    """Refuse `model=null`, `++model=hf` and the like, which Hydra answers with a traceback or without the key."""
    _refuse_flag(argument)
    if argument.lstrip("+~")[:1] in ("", "="):
        raise ConfigError(f"{argument or EMPTY}: has no key. Say KEY=VALUE.")
    if digits := re.search(rf"\d{{{MOST_DIGITS + 1},}}", argument):
        shown = argument.replace(digits.group(), f"{digits.group()[:9]}…")
        raise ConfigError(f"{shown}: has a number of {len(digits.group())} digits. Give it a smaller one.")
    given = argument.lstrip("+~")
    top, *below = given.partition("=")[0].split(".")
    if len(below) > 1 and is_list(key := f"{top}.{below[0]}") and not below[1].isdecimal():  # a number is an element's
        raise ConfigError(f"{given}: {key} is a list and has no keys. Give the whole list: {key}=[ONE,TWO].")
    _refuse_no_plugin(argument)
    group = given.partition("=")[0].partition("@")[0]
    if argument.startswith("-") or not group.isidentifier() or not (conf_dir() / group).is_dir():
        return
    if (read := parsed(argument)) is None:
        return
    override, value = read
    if isinstance(value, dict) and override.package is None:
        return  # `engine={name: zero2}` sets keys
    choose = f"Choose one of its options: {_choices(group)}."
    if override.is_delete():
        raise ConfigError(f"{given}: keys cannot be deleted. Give it another value, or leave it out.")
    if override.is_force_add():
        raise ConfigError(f"{given}: an option is chosen without ++. {choose}")
    if override.is_add() and group not in APPENDED:
        raise ConfigError(f"{given}: the group is there already. Leave out the +, and choose {_choices(group)}.")
    if not all(is_name(option) for option in alternatives(value)):
        raise ConfigError(f"{given}: is no option of the group {group}. {choose}")
    for files in (experiments().get(str(name), []) for name in alternatives(value) if group in APPENDED):
        if len(files) > 1:  # rlexp and the user both gave it this name, and Hydra would take rlexp's
            raise ConfigError(f"{given}: rlexp has an experiment of this name too. Give {files[-1]} another name.")


def _refuse_flag(argument: str) -> None:
    """Refuse a flag that Hydra does not have, which it answers with all those that it has."""
    flag, _, value = argument.partition("=")
    if not flag.startswith("--") or any(each.startswith(flag) for each in FLAGS):
        return
    word = flag.strip("-").replace("-", "_")
    keys = list(all_keys())
    if (meant := MEANT.get(word)) is not None:
        hint = f". {meant}"
    elif (key := THEIRS.get(word, word if word in keys else None)) is not None:
        hint = f". Say {key}={value or 'VALUE'}."
    else:
        hint = f".{suggestion(word, keys) or f' {PAGE} lists all keys.'}"
    raise ConfigError(f"{argument}: no such flag. Values are given as KEY=VALUE, without dashes{hint}")


def parsed(argument: str) -> tuple[Override, Any] | None:
    """Return an override and its value; None for what cannot be read, which Hydra says itself."""
    try:
        override = OverridesParser.create().parse_override(argument)
        return override, override.value()
    except HydraException:
        return None


def _refuse_no_plugin(argument: str) -> None:
    """Refuse `hydra.launcher=slurm`, `hydra/launcher=null` and the like, which Hydra answers with a traceback."""
    given = argument.lstrip("+~")
    key = given.partition("=")[0].partition("@")[0]
    group = key.removesuffix("._target_").replace(".", "/")
    if group not in PLUGINS and key != "hydra":
        return
    if (read := parsed(argument)) is None:
        return
    override, value = read
    if override.is_delete():
        raise ConfigError(f"{given}: keys cannot be deleted. Give it another value, or leave it out.")
    choose = f"Choose one that exists: {group}=OPTION."
    if key == PLUGINS[0] and (ours := {"submitit_slurm": "slurm", "submitit_local": "slurm_local"}.get(str(value))):
        raise ConfigError(f"{given}: is submitit's own, which starts no ranks. Say hydra/launcher={ours}.")
    if "/" in key:
        if not all(is_name(option) for option in alternatives(value)):
            raise ConfigError(f"{given}: is no option of the group {group}. {choose}")
    elif key.endswith("_target_") or (isinstance(value, dict) and "_target_" in value):
        raise ConfigError(f"{given}: an option of {group} sets it. {choose}")
    elif not isinstance(value, dict):
        option = f" To choose an option: {group}={value if is_name(value) else 'OPTION'}." if group in PLUGINS else ""
        raise ConfigError(f"{given}: is a group of keys. Set one of them: {key}.KEY=VALUE.{option}")


def alternatives(value: Any) -> list[Any]:
    """Each option of a sweep (`model=tiny,hf`), and each of a list."""
    options = value.list if isinstance(value, ChoiceSweep) else [value]
    return [each for option in options for each in (option if isinstance(option, list) else [option])]


def is_name(option: Any) -> bool:
    """Return whether this may be the name of an option: plain, or out of an environment variable that is set."""
    name = name_in(option)
    return name is not None and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", name) is not None


def name_in(option: Any) -> str | None:
    """Return the name that an override chooses, with the value of an environment variable in its place."""
    name = option.text if isinstance(option, QuotedString) else option
    if isinstance(name, str) and "${oc.env:" in name:
        try:
            name = OmegaConf.create({"name": name}).name
        except OmegaConfBaseException:
            return None
    return name if isinstance(name, str) else None


def _choices(group: str) -> str:
    names = sorted(experiments() if group in APPENDED else (p.stem for p in (conf_dir() / group).glob("*.yaml")))
    plus = "+" if group in APPENDED else ""
    return ", ".join(f"{plus}{group}={name}" for name in names)


def in_grammar(value: Any) -> str:
    """Write a value as Hydra reads it in an override. Interpolations in it stay alive."""
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_grammar(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_grammar, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def quoted(text: str) -> str:
    """Return a text in quotes, as Hydra reads it in an override: it may have spaces, commas, `=` and `${`."""
    return in_grammar(literal(text))


def literal(text: str) -> str:
    """Escape a text so that OmegaConf reads it as it stands. A backslash counts for OmegaConf only before `${`."""
    return re.sub(r"(?<!\\)(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", text)


def literals(value: Any) -> Any:
    """Return the same value, or dataclass, with every text in it escaped."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return literal(value)
    if isinstance(value, Mapping):
        return {key: literals(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [literals(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: literals(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
