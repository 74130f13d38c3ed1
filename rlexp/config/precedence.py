"""What is typed wins: a group's option on the command line, beside a file that sets keys of the same group.

Hydra puts the keys of an experiment over those of every option, also of one that is typed: beside an experiment with a
`model.path`, `model=llama3_1_8b` would name another model than the one that trains. So each value that the typed
option's file states is typed too. A value that follows from other keys (`${rlexp_lr:${loss.name},…}`) is a default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from hydra.core.override_parser.types import QuotedString

from rlexp.base import plain_yaml
from rlexp.base.errors import ConfigError
from rlexp.config.options import alternatives, in_grammar, parsed
from rlexp.config.paths import conf_dir, config_root, own_conf_dir
from rlexp.config.schema.keys import APPENDED, all_keys, listed

_FOLLOWS = re.compile(r"\$\{[^}]*\$\{")  # computed from other keys


@dataclasses.dataclass(frozen=True)
class Typed:
    """What a command line says: its keys, its groups' options, and the files that it appends."""

    keys: frozenset[str]
    options: Mapping[str, str]
    swept: tuple[tuple[str, str], ...]  # each option of a sweep, with its group
    appended: tuple[tuple[str, str], ...]  # group and name, as experiment and mine


@dataclasses.dataclass(frozen=True)
class Stands:
    """A value that a file gives a key, against the option that is typed."""

    key: str
    option: str  # as typed: model=tiny
    stated: Any
    file: Path
    there: Any

    @property
    def note(self) -> str:
        return f"{self.option} is typed, so its {self.key} holds. {self.file} has {self.there}."

    @property
    def override(self) -> str:
        """The option's value as an override of its own."""
        return f"{self.key}={in_grammar(self.stated)}"


def against(overrides: Sequence[str]) -> list[Stands]:
    """Return each value of an appended file that differs from what a typed option states. Keys that the option does not
    have are refused."""
    said = _typed(overrides)
    if not said.appended:
        return []
    body = {key: each for name in said.appended for key, each in _body(*name) if key not in said.keys}
    found: list[Stands] = []
    for group, option in (*said.swept, *said.options.items()):
        _refuse_foreign(group, option, {key: each for key, each in body.items() if key.startswith(f"{group}.")})
    for group, option in said.options.items():
        states, there = stated(group, option), {key: each for key, each in body.items() if key.startswith(f"{group}.")}
        found += [
            Stands(key, f"{group}={option}", states[key], file, value)
            for key, (file, value) in there.items()
            if key in states and states[key] != value
        ]
    return found


def _typed(overrides: Sequence[str]) -> Typed:
    keys: set[str] = set()
    options: dict[str, str] = {}
    swept: list[tuple[str, str]] = []
    appended: list[tuple[str, str]] = []
    for argument in overrides:
        key = argument.lstrip("+~").partition("=")[0].partition("@")[0]
        if "." in key:
            keys.add(key)
        elif key in APPENDED or (key.isidentifier() and (conf_dir() / key).is_dir()):
            values = alternatives(read[1]) if (read := parsed(argument)) else []
            names = [each.text if isinstance(each, QuotedString) else each for each in values]
            keys.update(f"{key}.{leaf}" for each in values if isinstance(each, Mapping) for leaf in each)
            found = [(key, name) for name in names if isinstance(name, str)]
            if key in APPENDED:
                appended += found
            elif len(found) > 1:
                swept += found
            else:
                options |= found
    return Typed(frozenset(keys), options, tuple(swept), tuple(appended))


def stated(group: str, option: str) -> dict[str, Any]:
    """Return the values that an option's file states, by their keys."""
    body = _option(group, option)
    return {f"{group}.{leaf}": value for leaf, value in body.items()
            if leaf != "defaults" and not (isinstance(value, str) and _FOLLOWS.search(value))}  # fmt: skip


def _body(group: str, name: str, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Yield each key that an appended file sets, also by the files of its group that it builds on, with the file."""
    folders = (conf_dir(), config_root() / "sweeps", own_conf_dir())
    file = next((path for each in folders if (path := each / group / f"{name}.yaml").is_file()), None)
    if file is None or file in seen:
        return
    body = _read(file)
    for each in body.pop("defaults", None) or ():
        if isinstance(each, str) and each != "_self_":
            yield from _body(group, each.removeprefix(f"/{group}/"), seen | {file})
    for top, keys in body.items():
        if isinstance(keys, Mapping):
            yield from ((f"{top}.{leaf}", (file, value)) for leaf, value in keys.items())


def _option(group: str, option: str) -> dict[str, Any]:
    return _read(conf_dir() / group / f"{option}.yaml")


def _read(file: Path) -> dict[str, Any]:
    """Return a file's values; none if it cannot be read, which Hydra says itself."""
    try:
        body = plain_yaml.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return dict(body) if isinstance(body, Mapping) else {}


def _refuse_foreign(group: str, option: str, there: Mapping[str, tuple[Path, Any]]) -> None:
    """Refuse an option beside a file that sets keys which only other options have."""
    schema = re.compile(rf"/schema/{group}/(\w+)@_here_")
    kinds = [found[1] for each in _option(group, option).get("defaults") or () if (found := schema.match(str(each)))]
    owners = all_keys()
    foreign = [key for key in there if kinds and owners.get(key) and f"{group}={kinds[0]}" not in owners[key]]
    if foreign:
        file = there[foreign[0]][0]
        raise ConfigError(
            f"{group}={option}: {file} sets {listed(foreign)}, which {group}={option} does not have. Copy the file "
            f"(python -m rlexp.recipe {quote(file.stem)} --copy conf/experiment/MINE.yaml), and leave out there what "
            f"belongs to another {group}."
        )
