"""What is typed wins: a group's option on the command line, beside a file that sets keys of the same group.

Hydra puts the keys of an experiment over those of every option, also of one that is typed: beside an experiment with a
`model.path`, `model=llama3_1_8b` would name another model than the one that trains. So each value that makes the typed
option what it is, is typed too: what its file states, its name, and what belongs to one model alone. A value that
follows from other keys (`${rlexp_lr:${loss.name},…}`) is a default, and the experiment's holds. So do the keys of an
experiment that chooses the very option that is typed.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import Any

from rlexp.base import plain_yaml
from rlexp.base.errors import ConfigError
from rlexp.config.options import alternatives, in_grammar, name_in, parsed
from rlexp.config.paths import conf_dir, config_root, own_conf_dir
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.keys import APPENDED, all_keys, enumerated

_FOLLOWS = re.compile(r"\$\{[^}]*\$\{")  # computed from other keys
# keys that say which option it is, where its file leaves them to the schema
NAMED_BY = {"optim": ("name",), "rollout": ("mode",), "adapter": ("name",),
            "model": ("revision", "gguf", "dtype", "chat_template", "add_tokens", "rope")}  # fmt: skip


@dataclasses.dataclass
class CommandLine:
    """What a command line says: its keys, its groups' options, and the files that it appends."""

    keys: set[str] = dataclasses.field(default_factory=set)
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    swept: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # each option of a sweep, with its group
    appended: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # group and name, as experiment and mine


def conflicts(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return for each value of an appended file that differs from what makes a typed option a note, and the override
    that sets the option's value. Keys that the option does not have are refused."""
    line = _command_line(overrides)
    if not line.appended:
        return []
    read = [each for group, name in line.appended for each in _body(group, Path(name))]
    body = {key: (file, value) for key, file, value in read if key not in line.keys}
    differing: list[tuple[str, str]] = []
    for group, option in (*line.swept, *line.options.items()):
        of_group = {key: each for key, each in body.items() if key.startswith(f"{group}.")}
        _refuse_foreign(group, option, of_group, line.appended)
    for group, option in line.options.items():
        if f"override /{group}" in body and body[f"override /{group}"][1] == option:
            continue
        states = stated(group, option)
        for key, (file, value) in body.items():
            if key in states and states[key] != value:
                note = f"{group}={option} is typed, so its {key} holds. {file} has {value}."
                differing.append((note, f"{key}={in_grammar(states[key])}"))
    return differing


def _command_line(overrides: Sequence[str]) -> CommandLine:
    line = CommandLine()
    for argument in overrides:
        key = argument.lstrip("+~").partition("=")[0].partition("@")[0]
        if "." in key:
            line.keys.add(key)
        elif key in APPENDED or (key.isidentifier() and (conf_dir() / key).is_dir()):
            values = alternatives(read[1]) if (read := parsed(argument)) else []
            line.keys.update(f"{key}.{leaf}" for each in values if isinstance(each, Mapping) for leaf in each)
            choices = [(key, name.removesuffix(".yaml")) for each in values if (name := name_in(each)) is not None]
            if key in APPENDED:
                line.appended += choices
            elif len(choices) > 1:
                line.swept += choices
            else:
                line.options |= choices
    return line


def stated(group: str, option: str) -> dict[str, Any]:
    """Return the values that make an option what it is, by their keys."""
    body = {leaf: value for leaf, value in _option(group, option).items() if leaf != "defaults"}
    own = {leaf: value for leaf, value in body.items()
           if leaf == "name" or not (isinstance(value, str) and _FOLLOWS.search(value))}  # fmt: skip
    kind = KINDS[group].get(_kind(group, option) or "") if group in KINDS else typing.get_type_hints(Config)[group]
    known: dict[str, Any] = {}  # the schema's values of the keys that say which option it is
    for field in dataclasses.fields(kind) if kind is not None else ():
        if field.name in NAMED_BY.get(group, ()):
            factory = field.default_factory
            value = field.default if factory is dataclasses.MISSING else factory()
            known[field.name] = value.name if isinstance(value, Enum) else value
    return {f"{group}.{leaf}": value for leaf, value in (known | own).items()}


def _kind(group: str, option: str) -> str | None:
    """Return the kind of a group's option, as its file names the schema."""
    schema = re.compile(rf"/schema/{group}/(\w+)@_here_")
    defaults = _option(group, option).get("defaults")
    matches = (schema.match(str(each)) for each in defaults) if isinstance(defaults, list) else ()
    return next((each[1] for each in matches if each), None)


def _body(group: str, name: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[str, Path, Any]]:
    """Yield each key that an appended file sets with the file and the value, also by the files that it builds on; and
    each option that it chooses, as its key `override /GROUP`."""
    folders = (conf_dir(), config_root() / "sweeps", own_conf_dir())
    files = ((path, plain_yaml.mapping_in(path)) for each in folders for path in [each / group / f"{name}.yaml"])
    file, body = next(((path, body) for path, body in files if body), (None, {}))
    if file is None or file in seen:
        return
    defaults = body.pop("defaults", None)
    for each in defaults if isinstance(defaults, list) else ():
        if isinstance(each, Mapping):
            yield from ((str(key), file, value) for key, value in each.items())
        base = str(each).partition("@")[0].removesuffix(".yaml")
        if isinstance(each, str) and base != "_self_" and (not base.startswith("/") or base.startswith(f"/{group}/")):
            yield from _body(group, Path(base.removeprefix(f"/{group}/")), seen | {file})
    for top, keys in body.items():
        if isinstance(keys, Mapping):
            yield from ((f"{top}.{leaf}", file, value) for leaf, value in keys.items())


def _option(group: str, option: str) -> dict[str, Any]:
    """Return what an option's file says; Hydra tells of one that cannot be read."""
    return plain_yaml.mapping_in(conf_dir() / group / f"{option}.yaml")


def _refuse_foreign(
    group: str, option: str, in_files: Mapping[str, tuple[Path, Any]], appended: Sequence[tuple[str, str]]
) -> None:
    """Refuse an option beside a file that sets keys which only other options have."""
    kind, owners = _kind(group, option), all_keys()
    foreign = [key for key in in_files if kind and owners.get(key) and f"{group}={kind}" not in owners[key]]
    if not foreign:
        return
    file = in_files[foreign[0]][0]
    typed = [name for of, name in appended if of == "experiment"]
    copying = f" (python -m rlexp.recipe {quote(file.stem)} --copy conf/experiment/MINE.yaml)" if typed else ""
    above = "" if not typed or file.stem in typed else f" (experiment={typed[-1]} builds on it)"
    raise ConfigError(
        f"{group}={option}: {file}{above} sets {enumerated(foreign)}, which {group}={option} does not have. Copy the "
        f"file{copying}, leave out there what belongs to another {group}, and use the copy in its place."
    )
