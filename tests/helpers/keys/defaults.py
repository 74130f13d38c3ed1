"""What a run gets for each key that nobody sets: the schema, `conf/config.yaml` and the option's file, merged in this
order, as Hydra does. A derived value is told in words: by the comment behind it, or above it, in its yaml file."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LATER = "required"  # a value that must be given
SCHEMA = re.compile(r"/schema/\w+/(\w+)@_here_")


def options_of(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def files_of(folder: Path, option: str) -> list[Path]:
    """Return the file of an option, after those that it builds on; none in a group without options."""
    if not option:
        return []
    file = folder / f"{option}.yaml"
    parents = [each for each in _loaded(file).get("defaults", []) if (folder / f"{each}.yaml").is_file()]
    return [*(path for parent in parents for path in files_of(folder, parent)), file]


def kind_of(folder: Path, option: str) -> str:
    """Return the kind of an option, by the schema that its file names; "" if it names none."""
    named = [
        SCHEMA.fullmatch(str(each)) for path in files_of(folder, option) for each in _loaded(path).get("defaults", [])
    ]
    return next((each[1] for each in named if each), "")


def defaults_of(owner: type, group: str, top: Path, files: list[Path]) -> dict[str, str]:
    """Return the default of each key of a group, as the page shows it."""
    base = _loaded(top) if top.is_file() else {}
    base = base.get(group, {}) if group else {key: base[key] for key in base if key in alone(owner)}
    for path in files:
        base = base | {key: value for key, value in _loaded(path).items() if key != "defaults"}
    values = OmegaConf.to_container(OmegaConf.merge(_structured(owner), base), enum_to_str=True)
    assert isinstance(values, dict)
    words = {key.removeprefix(f"{group}."): said for key, said in words_of(top).items() if key.startswith(f"{group}.")}
    for path in files:
        words |= words_of(path)
    return {str(key): shown(value, words.get(str(key))) for key, value in values.items()}


@functools.cache
def _structured(owner: type) -> Any:
    return OmegaConf.structured(owner)


def alone(owner: type) -> list[str]:
    """Return the keys of a class that are no groups."""
    hints = typing.get_type_hints(owner)
    return [field.name for field in dataclasses.fields(owner) if not dataclasses.is_dataclass(hints[field.name])]


def shown(value: Any, words: str | None = None) -> str:
    """Return a default as it is typed, or in words if it is derived."""
    if value == "???":
        return LATER
    if isinstance(value, str) and re.search(r"\$\{\w+:", value):
        return words or ""  # without words, it is told as missing
    if isinstance(value, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        return f"`{reference[1]}`"
    text = yaml_text(value)
    return f"`{text}`: {words}" if words and value is None else f"`{text}`"


def yaml_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return re.sub(r"e-0", "e-", f"{value:.12g}")
        case "":
            return "''"
        case [{}, *_]:
            return f"[{', '.join(map(yaml_text, value))}]"
        case {} if value:
            return f"{{{', '.join(f'{key}: {yaml_text(each)}' for key, each in value.items())}}}"
        case _:
            return str(value)


def words_of(path: Path) -> dict[str, str]:
    """Return what the comments of a yaml file say of its values: of one that is derived, or null."""
    return _words(path.read_text(encoding="utf-8")) if path.is_file() else {}


@functools.cache  # by their text: copies of conf/ share nearly all of their files
def _words(text: str) -> dict[str, str]:
    lines, words = text.splitlines(), {}
    for key, value in _scalars(yaml.compose(text, Loader=LOADER), ""):
        line = value.start_mark.line
        behind = lines[line][value.end_mark.column :].strip() if value.end_mark.line == line else ""
        above = lines[line - 1].strip() if line and value.value.startswith("${") else ""
        if behind.startswith("#") or above.startswith("#"):
            words[key] = (behind or above).lstrip("#").strip()
    return words


def _scalars(node: yaml.Node | None, prefix: str) -> list[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        return [(prefix, node)]
    if isinstance(node, yaml.MappingNode):
        return [
            each
            for key, value in node.value
            for each in _scalars(value, f"{prefix}.{key.value}" if prefix else key.value)
        ]
    return []


def opening(path: Path) -> str:
    """Return what the comment at the top of a yaml file says, as one text."""
    said = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        said.append(line.lstrip("#").strip())
    return " ".join(said)


def _loaded(path: Path) -> dict[str, Any]:
    return _parsed(path.read_text(encoding="utf-8"))


@functools.cache
def _parsed(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.load(text, Loader=LOADER) or {}
    return parsed
