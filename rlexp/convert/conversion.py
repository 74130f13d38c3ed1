"""One file that is being converted: what its arguments say, and what became of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rlexp.base.errors import UserError
from rlexp.base.secrets import masked
from rlexp.convert import kinds
from rlexp.convert.rules import UNSAID, ByTrainer, Fate, RefusedValue, Rule
from rlexp.convert.versions import CHANGES, PACKAGES, ChangedDefault, Versions, changes_of

NOTHING = "it sets nothing here"  # of an argument that no code read: a test refuses it
UNKNOWN_VARIABLE = "an environment variable: give it to `python -m rlexp` too, whose ranks get the same"


class ConvertError(UserError):
    """A file that cannot be converted."""


@dataclass(frozen=True)
class ArgumentNote:
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
    folder: Path = field(default_factory=Path)  # of the file
    undated: set[ChangedDefault] = field(default_factory=set)  # defaults that an older version has otherwise
    choices: dict[str, Value] = field(default_factory=dict)  # group → option
    values: dict[str, Value] = field(default_factory=dict)  # key → value
    command: dict[str, Value] = field(default_factory=dict)  # keys that belong on the command line
    lines: dict[Fate, list[ArgumentNote]] = field(default_factory=lambda: {fate: [] for fate in Fate})
    notes: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)  # arguments that are null, false or 0, and ask for nothing
    done: set[str] = field(default_factory=set)  # arguments whose fate is known

    def __post_init__(self) -> None:
        # of the framework's other trainers too; TRL's PPO is one of earlier versions, and has common names
        self.elsewhere = {name for rule in self.rules for name in rule.names
                          if self.framework != "TRL" or rule.trainers != ("ppo",) or self.trainer == "ppo"}  # fmt: skip
        self.rules = [rule for rule in self.rules if not rule.trainers or self.trainer in rule.trainers]
        self.by_name = {name: rule for rule in self.rules for name in (*rule.names, rule.alias) if name}

    # ---- asking ----

    def name(self, name: str) -> str | None:
        """Return the name under which the file gives an argument; None if the trainer or the file does not have it."""
        if (rule := self.by_name.get(name)) is None:
            return None
        own = (name, *(each for each in rule.names if each.endswith(f".{name}")))  # others share no more than a reason
        return next((each for each in (rule.names if rule.fate is Fate.TAKEN else own) if each in self.given), None)

    def spelled(self, name: str) -> str:
        """Return the name of an argument for a message: the file's, if the file has it, else the trainer's."""
        rule = self.by_name.get(name)
        return self.name(name) or (rule.names[0] if rule is not None and name == rule.alias else name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or its default: of its rule, if that has one."""
        spelled = self.name(name)
        return self.default(name, default) if spelled is None or self.given[spelled] is None else self.given[spelled]

    def default(self, name: str, other: Any = None) -> Any:
        """Return a default of the version that the file is for, as far as that is known."""
        rule = self.by_name.get(name)
        default = other if rule is None or rule.default is UNSAID else rule.default
        if isinstance(default, ByTrainer):
            default = default.get(self.trainer, other)
        for change in changes_of(self.framework, self.trainer, rule.names if rule else (name,)):
            older = self.versions.older(change.until)
            if older:
                return change.before
            if older is None:
                self.undated.add(change)
        return default

    def given_value(self, name: str) -> Any:
        """Return the value that the file has of an argument, or None."""
        spelled = self.name(name)
        return None if spelled is None else self.given[spelled]

    def refuse(self, name: str, rule: str, remedy: str) -> NoReturn:
        """Refuse the value of an argument, which the message names as the file does."""
        spelled = self.name(name) or name
        raise ConvertError(f"{spelled}={masked(spelled, self.given.get(spelled))}: {rule}. {remedy}")

    def _checked(self, name: str, default: Any, fit: Callable[[Any], Any]) -> Any:
        value = self.get(name, default)
        if value is None:
            return None
        if self.of_command and value is True and self.raw.get(str(self.name(name))) is True and fit is not kinds.flag:
            raise ConvertError(f"{self.name(name)}: has no value. Give one.")
        try:
            return fit(value)
        except kinds.WrongKind as wrong:
            self.refuse(name, str(wrong), self._remedy(name, default))

    def _remedy(self, name: str, default: Any = None, key: str = "") -> str:
        """Return what can be done about a wrong value: give one like the default, or leave it out."""
        example, spelled = self.default(name, default), self.name(name)
        instead = f" and set {key}" if key else ""
        given = example not in (None, [], {}, "")
        return f"For example: {spelled}={example}." if given else f"Correct it, or leave {spelled} out{instead}."

    def whole(self, name: str, default: Any = None, least: float | None = None) -> Any:
        """Return a whole number, or None if the file has none and there is no default."""
        return self.number(name, default, least, kinds.whole)

    def number(
        self, name: str, default: Any = None, least: float | None = None, fit: Callable[..., Any] = kinds.number
    ) -> Any:
        rule = self.by_name.get(name)
        limit = least if rule is None or rule.least is None else rule.least
        return self._checked(name, default, lambda value: fit(value, limit))

    def pair(self, name: str) -> list[float]:
        """Return two numbers."""
        value = self.get(name)
        pair = value if isinstance(value, list | tuple) else []
        if len(pair) != 2 or not all(map(kinds.is_number, pair)):
            first, second = self.default(name)
            self.refuse(name, "must be two numbers", f"For example: {self.name(name)}={first} {second}.")
        return [float(each) for each in pair]

    def weights(self, name: str, count: int, what: str, least: float = -math.inf) -> Sequence[float]:
        """Return a list of as many numbers as there are losses or rewards; nothing if the file has none."""
        value = self.get(name) if name in self.by_name else None
        if value is None or value == []:
            return []
        weights = value if isinstance(value, list) else [value]
        if not all(kinds.is_number(each) and each >= least for each in weights):
            limit = f" of at least {least}" if least > -math.inf else ""
            self.refuse(name, f"must be a list of numbers{limit}", f"Give one for each {what}.")
        if len(weights) != count:
            several = f"{what}{'es' if what.endswith('s') else 's'}"
            self.refuse(name, f"has {len(weights)} weights for {count} {several}", f"Give one for each {what}.")
        return weights

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._checked(name, default, kinds.flag))

    def text(self, name: str, default: str | None = None) -> Any:
        """Return a text as the file writes it: `007`, though that is a number too."""
        spelled = self.name(name)
        if spelled is not None and isinstance(self.raw.get(spelled), str) and self.given[spelled] is not None:
            return self.raw[spelled]
        return self._checked(name, default, kinds.text)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; a single one is a list of one, or of those that its rule separates."""
        value, split = self.get(name), self.by_name[name].split if name in self.by_name else None
        if not isinstance(value, list | tuple):
            single = self.text(name)
            value = [] if single is None else single.split(split) if split else [single]
        value = [each for each in value if each is not None]
        return [str(each).strip() for each in self._checked(name, None, lambda _: [kinds.text(v) for v in value]) or []]

    def mapping(self, name: str) -> dict[str, Any]:
        return self._checked(name, {}, kinds.mapping) or {}

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return a list of mappings."""
        return self._checked(name, None, kinds.entries) or []

    def missing(self, name: str, why: str, example: str) -> NoReturn:
        """Refuse a file without an argument, in the form that the file has."""
        name = self.spelled(name)
        where, given = ("command", f"--{name} {example}") if self.of_command else ("file", f"`{name}: {example}`")
        raise ConvertError(f"{name}: is missing, and {why}. Add it to the {where}, as {given}.")

    def chosen(self, group: str) -> str:
        """Return the option of a group of ours; empty if none is chosen."""
        return str(self.choices[group].value) if group in self.choices else ""

    # ---- saying what becomes of arguments ----

    def put(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Set our key, from these arguments; if the file has none of them, from the first one's default."""
        self.values[key] = Value(self._fitted(key, value, names), self._origin(names, why))

    def _fitted(self, key: str, value: Any, names: Sequence[str]) -> Any:
        spelled = next(filter(None, map(self.name, names)), None)
        option = self.chosen(key.partition(".")[0])
        scalar = spelled is not None and value is self.given[spelled] and not isinstance(value, bool)
        if scalar and kinds.hints(key, option)[:1] == (str,):
            value = self.raw.get(spelled or "", value)
        try:
            return kinds.fitted(key, value, option)
        except kinds.WrongKind as wrong:
            if spelled is None:
                raise ConvertError(f"{names[0] if names else key}={value}: {wrong}, for {key}.") from None
            self.refuse(spelled, str(wrong), self._remedy(spelled, key=key))

    def choose(self, group: str, option: str, *names: str, why: str = "") -> None:
        self.choices[group] = Value(option, self._origin(names, why))

    def on_command_line(self, key: str, value: Any, *names: str) -> None:
        self.command[key] = Value(value, self._origin(names, ""))

    def tell(self, fate: Fate, name: str, why: str) -> None:
        """Say of an argument, if the file has it and nothing is said of it yet, what else becomes of it."""
        spelled = self.name(name)
        if spelled is not None and spelled not in self.done:
            self.done.add(spelled)
            self._list(fate, spelled, why, off=self.given[spelled] is None or fate is not Fate.OTHER)

    def _list(self, fate: Fate, name: str, why: str, *, off: bool = True) -> None:
        """Add a line on an argument. One that is off needs none, unless that means something else here."""
        known, value = name in self.elsewhere or name in self.environment, self.given[name]
        if off and not value and (known or value in (None, False, "")):
            self.off.append(name)
        else:
            self.lines[fate].append(ArgumentNote(name, self.given[name], why, known))

    def remark(self, fate: Fate, name: str, value: Any, why: str) -> None:
        """Add a line on an argument that is taken over in part, or on a part of one."""
        if (line := ArgumentNote(name, value, why)) not in self.lines[fate]:
            self.lines[fate].append(line)

    def differs(self, name: str, why: str, fate: Fate = Fate.OTHER) -> None:
        """Add a line on an argument that is taken over, or on its default."""
        own = "" if self.name(name) else "their default: "
        self.remark(fate, self.spelled(name), self.get(name), f"{own}{why}")

    def _origin(self, names: Sequence[str], why: str) -> str:
        given = [each for each in map(self.name, names) if each is not None]
        self.done.update(given)
        origin = ", ".join(given) or (f"their default of {self.spelled(names[0])}" if names else "")
        return "; ".join(filter(None, [origin, why]))

    def settle(self) -> None:
        """Take over the arguments that need no other one, and explain all that are left."""
        for rule in self.rules:
            if rule.when is not None and not rule.when(self):
                for name in rule.names:
                    self.tell(Fate.NEEDLESS, name, rule.rest)
            elif rule.fate is Fate.TAKEN and rule.convert is not None:
                self._take(rule, rule.convert)
        # Which defaults are those of newer versions alone comes first.
        others = [f"{each.name.rpartition('.')[2]}={each.before} before {each.until}"
                  for each in CHANGES if each in self.undated]  # fmt: skip
        if others:
            package = next(name for name, of in PACKAGES.items() if of == self.framework)
            self.notes.insert(0, f"Versions: nothing says which of {self.framework} it is for, and the newer defaults "
                                 f"are taken. Older ones had {', '.join(others)}: give yours as --trainer "
                                 f"{package}==VERSION.")  # fmt: skip
        listed = {line.name for lines in self.lines.values() for line in lines}
        for name, value in self.given.items():
            if name not in self.done | listed:
                self._explain(name, value)
        order = {name: place for place, name in enumerate(self.given)}
        for lines in self.lines.values():  # as the file has them, and defaults behind
            lines.sort(key=lambda line: order.get(line.name.partition(":")[0], len(order)))

    def _take(self, rule: Rule, convert: Callable[[Any], Any]) -> None:
        name, group = rule.names[0], rule.key.partition(".")[0]
        if self.name(name) in self.done or rule.key in self.values:
            return
        option = self.chosen(group)
        if option and not kinds.has(rule.key, option):
            self.tell(Fate.NEEDLESS, name, rule.rest or f"{group}={option} has none")
            return
        value = self.get(name, UNSAID) if rule.least is None else self.number(name, UNSAID)
        if value is UNSAID:
            return
        try:
            ours = convert(value)
        except kinds.WrongKind as wrong:
            self.refuse(name, str(wrong), self._remedy(name))
        if isinstance(ours, RefusedValue):
            self.tell(ours.fate, name, ours.why)
        elif ours is not UNSAID:
            self.put(rule.key, ours, name, why=rule.why)

    def _explain(self, name: str, value: Any) -> None:
        if (rule := self.by_name.get(name)) is not None:
            harmless = any(_equal(value, each) for each in rule.harmless)
            fate = Fate.NEEDLESS if harmless or rule.fate is Fate.TAKEN else rule.fate
            self._list(fate, name, self._why_nothing(rule, name) if rule.fate is Fate.TAKEN else rule.why)
        elif name in self.environment:
            self._list(Fate.OTHER, name, UNKNOWN_VARIABLE)
        elif name in self.elsewhere:
            self._list(Fate.NEEDLESS, name, f"it changes nothing in {self.trainer}")
        else:
            self._list(Fate.ABSENT, name, f"no argument of {self.framework}'s {self.trainer} that is known here")

    def _why_nothing(self, rule: Rule, name: str) -> str:
        """Say why an argument that is taken over elsewhere sets nothing in this file."""
        if self.name(name) != name:
            return f"{self.name(name)} decides"
        if (ours := self.values.get(rule.key) or self.choices.get(rule.key)) is not None:
            return f"{ours.origin} decides"
        return rule.rest or NOTHING


def _equal(one: Any, other: Any) -> bool:
    """Compare values; 1 is not true."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
