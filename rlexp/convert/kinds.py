"""Give a value the kind that our key takes, as the schema says it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

from rlexp.base import plain_json
from rlexp.config.schema import KINDS, Config
from rlexp.convert.rules import same

SOURCES = "data.sources."


class WrongKind(Exception):
    """A value that a key cannot take. The message is the rule: `must be a whole number`."""


def _owners(group: str, option: str) -> list[Any]:
    """Return the classes that may have a key of a group, the option's first."""
    options, top = KINDS.get(group, {}), typing.get_type_hints(Config).get(group)
    return [each for each in (options.get(option), *options.values(), top) if dataclasses.is_dataclass(each)]


@functools.cache
def hints(key: str, option: str = "") -> tuple[type, ...]:
    """Return the kinds of value that a key takes, with this option of its group; nothing for one of an open mapping."""
    group, _, leaf = key.partition(".")
    top = typing.get_type_hints(Config).get(group)
    if top is None or not leaf:
        return () if top is None else _parts(top)
    owners = _owners(group, option)
    if key.startswith(SOURCES):
        owners, leaf = [KINDS["data"]["hf"]], key.removeprefix(SOURCES).partition(".")[2]
        if leaf == "weight":
            return float, type(None)
    owner = next((each for each in owners if leaf in each.__dataclass_fields__), None)
    return _parts(typing.get_type_hints(owner)[leaf]) if owner else ()


@functools.cache
def place(key: str, option: str = "") -> int:
    """Return where a key stands in its group, with this option of it."""
    group, _, leaf = key.partition(".")
    name = leaf.partition(".")[0]
    every = (list(each.__dataclass_fields__).index(name) for each in _owners(group, option)
             if name in each.__dataclass_fields__)  # fmt: skip
    return next(every, 0)


def has(key: str, option: str) -> bool:
    """Return whether an option of a group has the key; a group without options has all of its keys."""
    group, _, leaf = key.partition(".")
    owner = KINDS.get(group, {}).get(option)
    return owner is None or leaf.partition(".")[0] in {each.name for each in dataclasses.fields(owner)}


def _parts(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def fitted(key: str, value: Any, option: str = "") -> Any:
    """Return a value in the kind of our key, with this option of its group."""
    kinds = hints(key, option)
    if value is None and type(None) in kinds:
        return value
    if not kinds and not isinstance(value, bool | int | float | str | None):  # of an open mapping
        raise WrongKind("must be a text" if ".columns." in key else "must be a single value")
    if not kinds:
        return value
    kind: Any = next(each for each in kinds if each is not type(None))
    if value is None:
        raise WrongKind("needs a value")
    if str in kinds and isinstance(value, str):
        return value
    if kinds[:2] == (int, float):
        return number(value)
    plain: dict[Any, Callable[[Any], Any]] = {bool: flag, int: whole, float: number, str: text}
    return plain[kind](value) if kind in plain else _composed(kind, value)


def _composed(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is list:
        inner: Any = {float: number, Any: same}.get(typing.get_args(kind)[0], text)
        if not isinstance(value, list | tuple):
            raise WrongKind("must be a list")
        return [inner(each) for each in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongKind("must be a mapping")
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [each.value for each in kind]
        if value not in names:
            raise WrongKind(f"must be one of {', '.join(map(str, names))}")
    return value


def finite(value: float) -> bool:
    """Say whether a number is one that a float can be: a whole one may have too many digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def whole(value: Any, least: float | None = None) -> int:
    made = number(value, least, "whole number")
    if made != int(made):
        raise WrongKind(f"must be a whole number{_at_least(least)}")
    return int(made)


def number(value: Any, least: float | None = None, what: str = "number") -> float:
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(_\d{3})+", value):  # 20_000
        value = int(value)
    if not is_number(value) or not finite(value) or value < (-math.inf if least is None else least):
        raise WrongKind(f"must be a {what}{_at_least(least)}")
    return value


def _at_least(least: float | None) -> str:
    return "" if least is None else f" of at least {least:g}"


def flag(value: Any) -> bool:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise WrongKind("must be true or false")


def is_number(value: Any) -> typing.TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            value = plain_json.loads(value)
    if not isinstance(value, dict):
        raise WrongKind("must be a mapping")
    return {str(key): each for key, each in value.items()}


def entries(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise WrongKind("must be a list of mappings, each with a path")
    return value


def text(value: Any) -> str:
    if isinstance(value, list | tuple | dict) or value is None:
        raise WrongKind("must be a text")
    return str(value)
