"""What becomes of another trainer's arguments: one rule for each, and the list of what became of those of one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlexp.base.errors import UserError


class Fate(Enum):
    TAKEN = "taken over"
    OTHER = "means something else here"
    ABSENT = "not here"
    NEEDLESS = "needs nothing here"


class ConvertError(UserError):
    """A file that cannot be converted."""


UNSAID = object()  # an argument without a default that has to be written


@dataclass(frozen=True)
class Rule:
    """What becomes of one argument. The newest of its names comes first."""

    names: tuple[str, ...]
    fate: Fate
    key: str = ""  # ours, as the table of docs/coming_from.md shows it
    why: str = ""  # in one sentence, for the table and for the file that is written
    default: Any = UNSAID  # theirs, written where a file does not say it
    convert: Callable[[Any], Any] | None = (
        None  # from their value to ours; None: other code does it, with other arguments
    )
    harmless: tuple[Any, ...] = ()  # values with which an argument that is not here changes nothing
    trainers: tuple[str, ...] = ()  # that have it; empty: all


def same(value: Any) -> Any:
    return value


def taken(
    names: str, key: str, why: str = "", *, default: Any = UNSAID, to: Callable[[Any], Any] = same, of: str = ""
) -> Rule:
    """Make a rule: the value, or what `to` makes of it, is that of our key."""
    return Rule(tuple(names.split()), Fate.TAKEN, key, why, default, to, trainers=tuple(of.split()))


def worked_out(names: str, key: str, why: str, *, of: str = "") -> Rule:
    """Make a rule: our key follows from this argument and others."""
    return Rule(tuple(names.split()), Fate.TAKEN, key, why, trainers=tuple(of.split()))


def other(names: str, key: str, why: str, *, of: str = "") -> Rule:
    """Make a rule: there is something of the kind here, and it means something else. Nothing is written."""
    return Rule(tuple(names.split()), Fate.OTHER, key, why, convert=same, trainers=tuple(of.split()))


def absent(names: str, why: str, *harmless: Any, of: str = "") -> Rule:
    """Make a rule: rlexp does not have it. With a harmless value, or none, nothing is lost."""
    return Rule(
        tuple(names.split()), Fate.ABSENT, "", why, convert=same, harmless=(None, *harmless), trainers=tuple(of.split())
    )


def needless(names: str, why: str, *, of: str = "") -> Rule:
    """Make a rule: it changes no number, or rlexp always does it."""
    return Rule(tuple(names.split()), Fate.NEEDLESS, "", why, convert=same, trainers=tuple(of.split()))


@dataclass(frozen=True)
class Line:
    """An argument that was not simply taken over, and why."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Value:
    value: Any
    origin: str  # what stands behind it in the file: their argument, or that it is their default


@dataclass
class Conversion:
    """One file on its way to an experiment."""

    framework: str
    trainer: str
    given: Mapping[str, Any]  # arguments by name, as the file has them
    rules: Sequence[Rule]
    gpus: int | None = None  # as the command line says it
    choices: dict[str, Value] = field(default_factory=dict)  # group → option
    values: dict[str, Value] = field(default_factory=dict)  # key → value
    command: dict[str, Value] = field(default_factory=dict)  # keys that belong on the command line
    lines: dict[Fate, list[Line]] = field(default_factory=lambda: {fate: [] for fate in Fate})
    notes: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)  # arguments whose fate is known

    def __post_init__(self) -> None:
        self.rules = [rule for rule in self.rules if not rule.trainers or self.trainer in rule.trainers]
        self.by_name = {name: rule for rule in self.rules for name in rule.names}

    # ---- asking ----

    def name(self, name: str) -> str | None:
        """Return the name under which the file gives an argument."""
        return next((each for each in self.by_name[name].names if each in self.given), None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or its default."""
        said = self.name(name)
        return default if said is None or self.given[said] is None else self.given[said]

    def whole(self, name: str, default: int) -> int:
        """Return a whole number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ConvertError(f"{self.name(name)}={value}: must be a whole number.")
        return int(value)

    # ---- saying what becomes of arguments ----

    def put(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Set our key. It comes from these arguments; where the file has none of them, from their default."""
        self.values[key] = Value(value, self._origin(names, why))

    def choose(self, group: str, option: str, *names: str, why: str = "") -> None:
        self.choices[group] = Value(option, self._origin(names, why))

    def on_command_line(self, key: str, value: Any, *names: str) -> None:
        self.command[key] = Value(value, self._origin(names, ""))

    def tell(self, fate: Fate, name: str, why: str) -> None:
        """Say of an argument, if the file has it and nothing is said of it yet, what else becomes of it."""
        said = self.name(name)
        if said is not None and said not in self.done:
            self.done.add(said)
            self.lines[fate].append(Line(said, self.given[said], why))

    def remark(self, fate: Fate, name: str, value: Any, why: str) -> None:
        """Add a line on an argument that is taken over in part, or on a part of one."""
        self.lines[fate].append(Line(name, value, why))

    def _origin(self, names: Sequence[str], why: str) -> str:
        said = [each for each in map(self.name, names) if each is not None]
        self.done.update(said)
        origin = ", ".join(said) or (f"their default of {names[0]}" if names else "")
        return "; ".join(filter(None, [origin, why]))

    def settle(self) -> None:
        """Take over what stands for itself, and decide the fate of all that is left."""
        for rule in self.rules:
            if rule.fate is Fate.TAKEN and rule.convert is not None:
                self._take(rule, rule.convert)
        for name, value in self.given.items():
            if name not in self.done:
                self._explain(name, value)

    def _take(self, rule: Rule, convert: Callable[[Any], Any]) -> None:
        said = self.name(rule.names[0])
        value = rule.default if said is None else self.given[said]
        if said in self.done or value is UNSAID or value is None or rule.key in self.values:
            return
        ours = convert(value)
        if isinstance(ours, Refused):
            self.tell(Fate.ABSENT, rule.names[0], ours.why)
        else:
            self.put(rule.key, ours, rule.names[0], why=rule.why)

    def _explain(self, name: str, value: Any) -> None:
        rule = self.by_name.get(name)
        if rule is None:
            why = f"no argument of {self.framework}'s {self.trainer} that is known here"
            self.lines[Fate.ABSENT].append(Line(name, value, why))
        elif rule.fate is Fate.TAKEN:  # it says nothing, or another of its names decides
            self.lines[Fate.NEEDLESS].append(Line(name, value, "it sets nothing here"))
        else:
            harmless = rule.fate is Fate.ABSENT and value in rule.harmless
            self.lines[Fate.NEEDLESS if harmless else rule.fate].append(Line(name, value, rule.why))


@dataclass(frozen=True)
class Refused:
    """A value of an argument that has no equal here."""

    why: str


def one_of(options: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """Return what converts a value by a table; any other is not here."""

    def convert(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else value
        return options[wanted] if wanted in options else Refused(f"{what} {value} is not here")

    return convert


NEEDLESS = "These need nothing here, since no number depends on them or rlexp always does it:"


def table_of(rules: Sequence[Rule]) -> str:
    """Return the table of a page: their argument, ours, and what differs; then what needs nothing."""
    rows = ["| theirs | here | |", "| --- | --- | --- |"]
    for fate in (Fate.TAKEN, Fate.OTHER, Fate.ABSENT):
        for rule in (rule for rule in rules if rule.fate is fate):
            ours = _quoted(rule.key.split(", ")) if rule.key else fate.value
            rows.append(f"| {_quoted(rule.names)} | {ours} | {_differs(rule)} |")
    needless = {name for rule in rules if rule.fate is Fate.NEEDLESS for name in rule.names}
    return "\n".join(rows) + f"\n\n{NEEDLESS} {_quoted(sorted(needless))}.\n"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _differs(rule: Rule) -> str:
    of = ", ".join(rule.trainers)
    return ": ".join(filter(None, [of, rule.why]))
