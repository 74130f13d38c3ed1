"""The table of another trainer's arguments: one rule for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Fate(Enum):
    TAKEN = "taken over"
    INSTEAD = "trains something else than the file asks for"
    OTHER = "means something else here"
    ABSENT = "missing"
    NEEDLESS = "needs nothing here"


UNSAID = object()  # an argument without a default that has to be written


class ByTrainer(dict[str, Any]):
    """A default that each trainer has otherwise."""


@dataclass(frozen=True)
class Rule:
    """One row of the table: what becomes of one argument. The newest of its names comes first."""

    names: tuple[str, ...]
    fate: Fate
    key: str = ""  # ours, as the pages of docs/convert/ show it
    why: str = ""  # in one sentence, for the table and for the file that is written
    default: Any = UNSAID  # theirs: what code reads and, of a rule that converts, what is written
    convert: Callable[[Any], Any] | None = None  # from their value to ours; None: other code does it, with others
    harmless: tuple[Any, ...] = ()  # values with which a missing argument changes nothing
    trainers: tuple[str, ...] = ()  # that have it; empty: all
    until: tuple[str, ...] = ()  # options and keys of ours with which a rule that refuses is no longer right
    rest: str = ""  # why a value that asks for something sets nothing, where no code says it
    when: Callable[[Any], Any] | None = None  # whether it means anything in a conversion; else `rest` says why not
    alias: str = ""  # the name by which code that several trainers share asks for it
    split: str | None = None  # what separates the texts that one may hold
    least: float | None = None  # of a number


def same(value: Any) -> Any:
    return value


def _rule(names: str, fate: Fate, key: str, why: str, of: str = "", until: str = "", **more: Any) -> Rule:
    return Rule(tuple(names.split()), fate, key, why, trainers=tuple(of.split()), until=tuple(until.split()), **more)


def taken(names: str, key: str, why: str = "", rest: str = "", *, to: Callable[[Any], Any] = same, **more: Any) -> Rule:
    """Make a rule: our key takes their value, or what `to` makes of it."""
    return _rule(names, Fate.TAKEN, key, why, rest=rest, convert=to, **more)


def worked_out(names: str, key: str, why: str = "", rest: str = "", **more: Any) -> Rule:
    """Make a rule: our key follows from this argument and others. `rest` says why where it does not."""
    return _rule(names, Fate.TAKEN, key, why, rest=rest, **more)


def other(names: str, key: str, why: str, **more: Any) -> Rule:
    """Make a rule: there is something of the kind here, and it means something else. Nothing is written."""
    return _rule(names, Fate.OTHER, key, why, **more)


def absent(names: str, why: str, *harmless: Any, fate: Fate = Fate.ABSENT, **more: Any) -> Rule:
    """Make a rule: rlexp does not have it; or, by its `fate`, trains something else without it. With a harmless value,
    or none, nothing is lost. `until` names the options or keys of ours that would have it: a test fails once one
    exists."""
    return _rule(names, fate, "", why, harmless=harmless, **more)


def needless(names: str, why: str, **more: Any) -> Rule:
    """Make a rule: it changes no number, or rlexp always does it."""
    return _rule(names, Fate.NEEDLESS, "", why, **more)


def for_trainers(of: str, *rules: Rule) -> Sequence[Rule]:
    """Return rules of arguments that only these trainers have, but for those that say which do."""
    return [replace(rule, trainers=rule.trainers or tuple(of.split())) for rule in rules]


def extended(shared: Sequence[Rule], *own: Rule, **defaults: Any) -> tuple[Rule, ...]:
    """Return shared rules with a framework's defaults, and its own rules in place of those with their first name or
    alias, for the trainers that these are for."""
    kept = []
    for rule in shared:
        name = rule.names[0]
        others = [each for each in own if name in (each.names[0], each.alias)]
        trainers = tuple(each for each in rule.trainers if all(each not in one.trainers for one in others))
        if not others or (trainers and all(each.trainers for each in others)):
            kept.append(replace(rule, default=defaults.get(name, rule.default), trainers=trainers))
    return (*kept, *own)


@dataclass(frozen=True)
class RefusedValue:
    """A value of an argument that has no equal here."""

    why: str
    fate: Fate = Fate.ABSENT


def one_of(options: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """Return what converts a value by a table; any other is missing."""

    def convert(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else None
        return options[wanted] if wanted in options else RefusedValue(f"{what} {value} is missing")

    return convert
