"""The kind of value that each key takes, read off the schema: in words for messages, and checked where Hydra cannot;
and the entries of an open mapping, such as `reward.terms`, each by a schema of its own.

Hydra checks what a command line gives; what an interpolation comes to is only known when it is resolved.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.errors import ConfigError
from rlexp.config.paths import conf_dir
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.bounds import as_typed, example
from rlexp.config.schema.keys import suggestion

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_ENTRIES = {Any: bool | int | float | str | None, float: int | float}  # what stands for a kind inside a container
_PLAIN = "a number, a text, true, false, null, or a list or mapping of these"
_LIST, _MAPPING = "a list, as [ONE, TWO] or []", "a mapping, as {NAME: VALUE} or {}"


def rule(key: str, chosen: type | None = None) -> str | None:
    """`must be a whole number. For example: train.batch_size=8.`; None for a key that the schema does not have.

    `chosen` is the class of the option whose key it is, where options have keys of the same name.
    """
    group, _, leaf = key.partition(".")
    hint = typing.get_type_hints(Config).get(group)
    if hint is None:
        return None
    if not leaf:
        if dataclasses.is_dataclass(hint):
            choose = f" Choose {group}=OPTION, or set" if (conf_dir() / group).is_dir() else " Set"
            return f"must be a group of keys.{choose} a key of it: {group}.KEY=VALUE."
        return f"must be {in_words(hint)}. {example(key, Config.__dataclass_fields__[group].default)}"
    for owner in (chosen, *KINDS.get(group, {}).values(), hint):
        if dataclasses.is_dataclass(owner) and leaf in owner.__dataclass_fields__:
            field = owner.__dataclass_fields__[leaf]
            return f"must be {in_words(typing.get_type_hints(owner)[leaf])}. {example(key, field.default)}"
    return None


def is_list(key: str) -> bool:
    return (rule(key) or "").startswith(f"must be {_LIST}")


def in_words(hint: Any) -> str:
    """Return the kind of value that a type takes: `a whole number, or null`."""
    plain, optional = _unwrapped(hint)
    origin = typing.get_origin(plain)
    if isinstance(plain, types.UnionType):
        kinds = [each for each in typing.get_args(plain) if each is not int or float not in typing.get_args(plain)]
        kinds.sort(key=lambda each: each in (int, float))  # bounds are said behind numbers
        words = ", or ".join(map(in_words, kinds))
    elif origin is list:
        words = _LIST
    elif origin is dict:
        words = _MAPPING
    elif isinstance(plain, type) and issubclass(plain, Enum):
        words = f"one of {', '.join(each.name for each in plain)}"
    else:
        words = _WORDS[plain]
    return f"{words}, or null" if optional else words


def _unwrapped(hint: Any) -> tuple[Any, bool]:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    if type(None) not in kinds:
        return hint, False
    return functools.reduce(operator.or_, [each for each in kinds if each is not type(None)]), True


def check_kinds(node: Any, prefix: str = "") -> None:
    """Refuse a group, a list or a mapping that an interpolation has made something else, or that holds something else:
    Hydra puts a mapping into a list of texts, and whole groups into `engine.overrides`."""
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        plain, optional = _unwrapped(hints[field.name])
        if value is None and optional:
            continue
        kind = plain if isinstance(plain, types.UnionType) else typing.get_origin(plain) or plain  # list for list[str]
        if not isinstance(value, (int, float) if plain is float else kind):
            raise ConfigError(f"{key}={value}: {rule(key, type(node))}")
        for where, each, hint in _misfits(key, value, plain):
            shown = f"{type(each).__name__}(…)" if dataclasses.is_dataclass(each) else each
            words = _PLAIN if hint is Any else in_words(hint)
            raise ConfigError(f"{where}={shown}: must be {words}. Give it a plain value.")
        if dataclasses.is_dataclass(value):
            check_kinds(value, f"{key}.")


def _misfits(key: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of a list or mapping that are not of its kind. `Any` stands for what yaml can write."""
    inside = Any if hint is Any else (typing.get_args(hint) or (None,))[-1]
    if isinstance(value, list | dict) and inside is not None:
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in named:
            yield from _misfits(f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]", each, inside)
    elif not isinstance(value, _ENTRIES.get(hint, hint)):
        yield key, value, hint


def with_names(node: Any) -> Any:
    """Return a copy of a configuration in which an option that an interpolation has put into an open mapping or list is
    its name, as in a file."""
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    groups = {name: with_names(value) for name, value in values.items() if dataclasses.is_dataclass(value)}
    opened = {name: _named(value) for name, value in values.items() if isinstance(value, dict | list)}
    return dataclasses.replace(node, **groups, **opened)


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, dict):
        return {name: _named(each) for name, each in value.items()}
    return value.name if isinstance(value, Enum) else value


def typed_entry(
    key: str, schema: type, own: Mapping[str, Any], what: str, beside: Sequence[str] = (), hidden: Sequence[str] = ()
) -> Any:
    """Convert an entry by its schema. Refuse unknown keys and values of a wrong type.

    `beside` names its other keys, and `hidden` those of the schema that it does not have.
    """
    known = [leaf.name for leaf in fields(schema) if leaf.name not in ("name", *hidden)]
    for leaf in own:
        if leaf not in known:
            raise ConfigError(
                f"{key}.{leaf}: no such key of {what}.{suggestion(leaf, [*known, *beside])} "
                f"Keys: {', '.join([*beside, *known])}."
            )
    node, hints = OmegaConf.structured(schema), typing.get_type_hints(schema)
    for leaf, value in own.items():
        try:
            node[leaf] = value
        except (OmegaConfBaseException, OverflowError):  # the latter by a whole number that no float is near
            rule, default = in_words(hints[leaf]), {each.name: each.default for each in fields(schema)}[leaf]
            problem = f"{key}.{leaf}={as_typed(value)}: must be {rule}."
            raise ConfigError(f"{problem} {example(f'{key}.{leaf}', default)}") from None
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"{key}.{missing[0]}: has no value, and {what} needs one. Give {key}.{missing[0]}=VALUE.")
    return OmegaConf.to_object(node)
