"""What becomes of another trainer's arguments: one rule for each, and the list of what became of those of one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from rlexp.base.errors import UserError
from rlexp.base.secrets import masked
from rlexp.convert import kinds
from rlexp.convert.versions import PACKAGES, Change, Versions, changes_of


class Fate(Enum):
    TAKEN = "taken over"
    INSTEAD = "trains something else than the file asks for"
    OTHER = "means something else here"
    ABSENT = "missing"
    NEEDLESS = "needs nothing here"


class ConvertError(UserError):
    """A file that cannot be converted."""


UNSAID = object()  # an argument without a default that has to be written
NOTHING = "it sets nothing here"  # of an argument that no code read: a test refuses it
UNKNOWN_VARIABLE = "an environment variable: give it to `python -m rlexp` too, whose ranks get the same"


@dataclass(frozen=True)
class Rule:
    """What becomes of one argument. The newest of its names comes first."""

    names: tuple[str, ...]
    fate: Fate
    key: str = ""  # ours, as the pages of docs/convert/ show it
    why: str = ""  # in one sentence, for the table and for the file that is written
    default: Any = UNSAID  # theirs, written where a file does not say it
    convert: Callable[[Any], Any] | None = None  # from their value to ours; None: other code does it, with others
    harmless: tuple[Any, ...] = ()  # values with which a missing argument changes nothing
    trainers: tuple[str, ...] = ()  # that have it; empty: all
    until: tuple[str, ...] = ()  # options and keys of ours with which a rule that refuses is no longer right
    rest: str = ""  # why a value that asks for something sets nothing, where no code says it


def same(value: Any) -> Any:
    return value


def taken(
    names: str, key: str, why: str = "", *, default: Any = UNSAID, to: Callable[[Any], Any] = same, of: str = ""
) -> Rule:
    """Make a rule: our key takes their value, or what `to` makes of it."""
    return Rule(tuple(names.split()), Fate.TAKEN, key, why, default, to, trainers=tuple(of.split()))


def worked_out(names: str, key: str, why: str, rest: str = "", *, of: str = "", until: str = "") -> Rule:
    """Make a rule: our key follows from this argument and others. `rest` says why where it does not."""
    trainers, ends = tuple(of.split()), tuple(until.split())
    return Rule(tuple(names.split()), Fate.TAKEN, key, why, trainers=trainers, until=ends, rest=rest)


def other(names: str, key: str, why: str, *, of: str = "") -> Rule:
    """Make a rule: there is something of the kind here, and it means something else. Nothing is written."""
    return Rule(tuple(names.split()), Fate.OTHER, key, why, convert=same, trainers=tuple(of.split()))


def absent(
    names: str, why: str, *harmless: Any, of: str = "", until: str = "", fate: Fate = Fate.ABSENT
) -> Rule:  # fmt: skip
    """Make a rule: rlexp does not have it; or, by its `fate`, trains something else without it. With a harmless value,
    or none, nothing is lost. `until` names the options or keys of ours that would have it: a test fails once one
    exists."""
    trainers, ends = tuple(of.split()), tuple(until.split())
    return Rule(tuple(names.split()), fate, "", why, convert=same, harmless=harmless, trainers=trainers, until=ends)


def needless(names: str, why: str, *, of: str = "") -> Rule:
    """Make a rule: it changes no number, or rlexp always does it."""
    return Rule(tuple(names.split()), Fate.NEEDLESS, "", why, convert=same, trainers=tuple(of.split()))


@dataclass(frozen=True)
class Line:
    """An argument that was not simply taken over, and why."""

    name: str
    value: Any
    why: str
    known: bool = True  # as an argument of the trainer


@dataclass(frozen=True)
class Value:
    value: Any
    origin: str  # the comment behind it in the file: their argument, or that it is their default


@dataclass
class Conversion:
    """One file that is being converted to an experiment."""

    framework: str
    trainer: str
    given: Mapping[str, Any]  # arguments by name, as the file has them
    rules: Sequence[Rule]
    gpus: int | None = None  # from the command line
    raw: Mapping[str, Any] = field(default_factory=dict)  # texts that `given` has as numbers
    environment: frozenset[str] = frozenset()  # names in `given` that are variables of the environment
    of_command: bool = False  # the arguments are a command's
    versions: Versions = field(default_factory=Versions)  # of the framework
    undated: dict[Change, Any] = field(default_factory=dict)  # defaults that an older version has otherwise
    choices: dict[str, Value] = field(default_factory=dict)  # group → option
    values: dict[str, Value] = field(default_factory=dict)  # key → value
    command: dict[str, Value] = field(default_factory=dict)  # keys that belong on the command line
    lines: dict[Fate, list[Line]] = field(default_factory=lambda: {fate: [] for fate in Fate})
    notes: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)  # arguments that are null, false or 0, and ask for nothing
    done: set[str] = field(default_factory=set)  # arguments whose fate is known

    def __post_init__(self) -> None:
        # of the framework's other trainers too; TRL's PPO is one of earlier versions, and has common names
        self.elsewhere = {name for rule in self.rules for name in rule.names
                          if self.framework != "TRL" or rule.trainers != ("ppo",) or self.trainer == "ppo"}  # fmt: skip
        self.rules = [rule for rule in self.rules if not rule.trainers or self.trainer in rule.trainers]
        self.by_name = {name: rule for rule in self.rules for name in rule.names}

    # ---- asking ----

    def name(self, name: str) -> str | None:
        """Return the name under which the file gives an argument; None if the trainer or the file does not have it."""
        if (rule := self.by_name.get(name)) is None:
            return None
        own = (name, *(each for each in rule.names if each.endswith(f".{name}")))  # others share no more than a reason
        return next((each for each in (rule.names if rule.fate is Fate.TAKEN else own) if each in self.given), None)

    def said(self, name: str) -> str:
        """Return the name of an argument for a message: the file's, if the file has it."""
        return self.name(name) or name

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or its default."""
        said = self.name(name)
        return self.dated(name, default) if said is None or self.given[said] is None else self.given[said]

    def dated(self, name: str, default: Any) -> Any:
        """Return a default of the version that the file is for, as far as that is known."""
        rule = self.by_name.get(name)
        for change in changes_of(self.framework, self.trainer, rule.names if rule else (name,)):
            older = self.versions.older(change.until)
            if older:
                return change.before
            if older is None:
                self.undated[change] = default
        return default

    def refuse(self, name: str, rule: str, remedy: str) -> NoReturn:
        """Refuse the value of an argument, which the message names as the file does."""
        said = self.name(name) or name
        raise ConvertError(f"{said}={masked(said, self.given.get(said))}: {rule}. {remedy}")

    def _checked(self, name: str, default: Any, fit: Callable[[Any], Any]) -> Any:
        value = self.get(name, default)
        if value is None:
            return None
        try:
            return fit(value)
        except kinds.WrongKind as wrong:
            example = default if default not in (None, [], {}, "") else None
            said = self.name(name)
            remedy = f"For example: {said}={example}." if example is not None else f"Correct it, or leave {said} out."
            self.refuse(name, str(wrong), remedy)

    def whole(self, name: str, default: Any = None, least: float | None = None) -> Any:
        """Return a whole number, or None if the file has none and there is no default."""
        return self._checked(name, default, lambda value: kinds.whole(value, least))

    def number(self, name: str, default: Any = None, least: float | None = None) -> Any:
        return self._checked(name, default, lambda value: kinds.number(value, least))

    def pair(self, name: str, default: tuple[float, float]) -> list[float]:
        """Return two numbers."""
        said = self.get(name, default)
        pair = said if isinstance(said, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in pair):
            self.refuse(name, "must be two numbers", f"For example: {self.name(name)}={default[0]} {default[1]}.")
        return [float(each) for each in pair]

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._checked(name, default, kinds.flag))

    def text(self, name: str, default: str | None = None) -> Any:
        """Return a text as the file writes it: `007`, though that is a number too."""
        said = self.name(name)
        if self.of_command and said is not None and self.raw.get(said) is True:
            self.refuse(name, "has no value", "Give one.")
        if said is not None and isinstance(self.raw.get(said), str) and self.given[said] is not None:
            return self.raw[said]
        return self._checked(name, default, kinds.text)

    def texts(self, name: str, split: str | None = None) -> list[str]:
        """Return a list of texts; a single one is a list of one, and `split` separates those in one text."""
        value = self.get(name)
        if not isinstance(value, list):
            single = self.text(name)
            value = [] if single is None else single.split(split) if split else [single]
        value = [each for each in value if each is not None]
        return [str(each).strip() for each in self._checked(name, None, lambda _: [kinds.text(v) for v in value]) or []]

    def mapping(self, name: str) -> dict[str, Any]:
        def fit(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise kinds.WrongKind("must be a mapping")
            return {str(key): each for key, each in value.items()}

        return self._checked(name, {}, fit) or {}

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return a list of mappings."""

        def fit(value: Any) -> list[dict[str, Any]]:
            if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
                raise kinds.WrongKind("must be a list of mappings, each with a path")
            return value

        return self._checked(name, None, fit) or []

    def needed(self, name: str, what: str, example: str) -> str:
        """Return a text without which there is no run."""
        value = self.text(name)
        if value is None:
            self.missing(name, f"it names {what}", example)
        return str(value)

    def missing(self, name: str, why: str, example: str) -> NoReturn:
        """Refuse a file without an argument, in the form that the file has."""
        where, given = ("command", f"--{name} {example}") if self.of_command else ("file", f"`{name}: {example}`")
        raise ConvertError(f"{name}: is missing, and {why}. Add it to the {where}, as {given}.")

    # ---- saying what becomes of arguments ----

    def put(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Set our key, from these arguments; if the file has none of them, from the first one's default."""
        self.values[key] = Value(self._fitted(key, value, names), self._origin(names, why))

    def _fitted(self, key: str, value: Any, names: Sequence[str]) -> Any:
        said = next(filter(None, map(self.name, names)), None)
        chosen = self.choices.get(key.partition(".")[0])
        option = str(chosen.value) if chosen else ""
        scalar = said is not None and value is self.given[said] and not isinstance(value, bool)
        if scalar and kinds.hints(key, option)[:1] == (str,):
            value = self.raw.get(said or "", value)
        try:
            return kinds.fitted(key, value, option)
        except kinds.WrongKind as wrong:
            if said is None:
                raise ConvertError(f"{names[0] if names else key}={value}: {wrong}, for {key}.") from None
            self.refuse(said, str(wrong), f"Correct it, or leave {said} out and set {key}.")

    def choose(self, group: str, option: str, *names: str, why: str = "") -> None:
        self.choices[group] = Value(option, self._origin(names, why))

    def on_command_line(self, key: str, value: Any, *names: str) -> None:
        self.command[key] = Value(value, self._origin(names, ""))

    def tell(self, fate: Fate, name: str, why: str) -> None:
        """Say of an argument, if the file has it and nothing is said of it yet, what else becomes of it."""
        said = self.name(name)
        if said is not None and said not in self.done:
            self.done.add(said)
            self._say(fate, said, why, off=self.given[said] is None or fate is not Fate.OTHER)

    def _say(self, fate: Fate, name: str, why: str, *, off: bool = True) -> None:
        """Add a line on an argument. One that is off needs none, unless that means something else here."""
        if off and not self.given[name]:
            self.off.append(name)
        else:
            self.lines[fate].append(
                Line(name, self.given[name], why, name in self.elsewhere or name in self.environment)
            )

    def remark(self, fate: Fate, name: str, value: Any, why: str) -> None:
        """Add a line on an argument that is taken over in part, or on a part of one."""
        if (line := Line(name, value, why)) not in self.lines[fate]:
            self.lines[fate].append(line)

    def _origin(self, names: Sequence[str], why: str) -> str:
        said = [each for each in map(self.name, names) if each is not None]
        self.done.update(said)
        origin = ", ".join(said) or (f"their default of {names[0]}" if names else "")
        return "; ".join(filter(None, [origin, why]))

    def settle(self) -> None:
        """Take over the arguments that need no other one, and explain all that are left."""
        for rule in self.rules:
            if rule.fate is Fate.TAKEN and rule.convert is not None:
                self._take(rule, rule.convert)
        self._tell_undated()
        told = {line.name for lines in self.lines.values() for line in lines}
        for name, value in self.given.items():
            if name not in self.done | told:
                self._explain(name, value)

    def _tell_undated(self) -> None:
        """Say in the first lines which defaults are those of newer versions alone."""
        others = [f"{change.name.rpartition('.')[2]}={change.before} before {change.until}" for change in self.undated]
        if others:
            package = next(name for name, of in PACKAGES.items() if of == self.framework)
            self.notes.insert(0, f"Versions: the newest defaults of {self.framework} are taken. Older ones had "
                                 f"{', '.join(others)}: give yours as --trainer {package}==VERSION.")  # fmt: skip

    def _take(self, rule: Rule, convert: Callable[[Any], Any]) -> None:
        said = self.name(rule.names[0])
        missing = said is None or self.given[said] is None
        value = self.dated(rule.names[0], rule.default) if missing else self.given[said or ""]
        if said in self.done or value is UNSAID or rule.key in self.values:
            return
        chosen = self.choices.get(rule.key.partition(".")[0])
        if chosen is not None and not kinds.has(rule.key, str(chosen.value)):
            self.tell(Fate.NEEDLESS, rule.names[0], f"{rule.key.partition('.')[0]}={chosen.value} has none")
            return
        ours = convert(value)
        if isinstance(ours, Refused):
            self.tell(Fate.ABSENT, rule.names[0], ours.why)
        else:
            self.put(rule.key, ours, rule.names[0], why=rule.why)

    def _explain(self, name: str, value: Any) -> None:
        rule = self.by_name.get(name)
        fate, why = Fate.ABSENT, f"no argument of {self.framework}'s {self.trainer} that is known here"
        if name in self.environment and rule is None:
            fate, why = Fate.OTHER, UNKNOWN_VARIABLE
        elif rule is None and name in self.elsewhere:
            fate, why = Fate.NEEDLESS, f"it changes nothing in {self.trainer}"
        elif rule is not None and rule.fate is Fate.TAKEN:
            fate, why = Fate.NEEDLESS, self._why_nothing(rule, name)
        elif rule is not None:
            harmless = any(_equal(value, each) for each in rule.harmless)
            fate, why = Fate.NEEDLESS if harmless else rule.fate, rule.why
        self._say(fate, name, why)

    def _why_nothing(self, rule: Rule, name: str) -> str:
        """Say why an argument that is taken over elsewhere sets nothing in this file."""
        if self.name(name) != name:
            return f"{self.name(name)} decides"
        if (said := self.values.get(rule.key) or self.choices.get(rule.key)) is not None:
            return f"{said.origin} decides"
        return rule.rest or NOTHING


def _equal(one: Any, other: Any) -> bool:
    """Compare values; 1 is not true."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@dataclass(frozen=True)
class Refused:
    """A value of an argument that has no equal here."""

    why: str


def one_of(options: Mapping[Any, Any], what: str) -> Callable[[Any], Any]:
    """Return what converts a value by a table; any other is missing."""

    def convert(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else None
        return options[wanted] if wanted in options else Refused(f"{what} {value} is missing")

    return convert
