"""The groups of keys, and a row for each key. A key that means the same in several options of a group, within the
same bounds, is one row."""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.bounds import Bounds
from rlexp.config.schema.data import SourceConfig
from rlexp.config.schema.launcher_keys import LocalJobs, SlurmJobs
from rlexp.config.schema.losses import ALL_MODIFIERS, PreferenceConfig
from rlexp.config.schema.reward_terms import KINDS_OF_TERMS, TermConfig
from rlexp.config.schema.value_kinds import in_words
from tests.helpers.keys.defaults import alone, defaults_of, files_of, kind_of, opening, options_of
from tests.helpers.keys.meanings import meaning
from tests.helpers.paths import ROOT

NONE = type(None)
LAUNCHERS = {"slurm": SlurmJobs, "slurm_local": LocalJobs}  # of the options of hydra/launcher, those with keys


@dataclass(frozen=True)
class Schema:
    """Where the keys are read from. Tests plant something into one of these."""

    top: type = Config
    kinds: Mapping[str, Mapping[str, type]] = dataclasses.field(default_factory=lambda: KINDS)
    conf: Path = ROOT / "conf"
    launchers: Path = ROOT / "launchers" / "hydra" / "launcher"


@dataclass(frozen=True)
class Option:
    name: str
    about: str
    defaults: Mapping[str, str]  # of each key


@dataclass(frozen=True)
class Row:
    leaf: str
    owners: tuple[str, ...]  # the options that have the key; none if all have it
    defaults: Mapping[str, str]  # by option
    values: str  # what kind of value, within which bounds
    bounds: str
    choices: Mapping[str, str | None]  # the meaning of each option of an Enum
    meaning: str | None


@dataclass(frozen=True)
class Group:
    name: str
    about: str | None
    options: Sequence[Option]
    rows: Sequence[Row]
    chosen: str | None = None  # the option that a run has if none is named


def groups(schema: Schema) -> Iterator[Group]:
    """Yield the groups in the order of the schema; the keys outside any group are the first."""
    plain, top = alone(schema.top), defaults_of(schema.top, "", schema.conf / "config.yaml", [])
    fields = {field.name: field for field in dataclasses.fields(schema.top)}
    yield Group("", "keys outside any group", [], [row(schema.top, fields[key], {"": top[key]}, ()) for key in plain])
    for name in fields:
        if name not in plain:
            yield group(schema, name)
            yield from entries(name)
    yield launcher(schema)


def group(schema: Schema, name: str) -> Group:
    folder, chosen = schema.conf / name, chosen_in(schema.conf, name)
    kinds = schema.kinds.get(name) or {"": typing.get_type_hints(schema.top)[name]}
    kind = {each: kind_of(folder, each) for each in options_of(folder) or [""]}
    places = list(kinds)
    names = sorted(kind, key=lambda each: (each != chosen, places.index(kind[each]), each != kind[each]))
    owners = {each: kinds[kind[each]] for each in names}
    options = [
        Option(
            each,
            opening(folder / f"{each}.yaml") if each else "",
            defaults_of(owner, name, schema.conf / "config.yaml", files_of(folder, each)),
        )
        for each, owner in owners.items()
    ]
    return Group(name, meaning(schema.top, name), options, rows(owners, options), chosen)


def entries(name: str) -> Iterator[Group]:
    """Yield the keys of what people name themselves inside a group."""
    if name == "data":
        yield entry("data.sources.NAME", "one of several sources, with `data=hf`", SourceConfig)
    if name == "reward":
        yield entry("reward.terms.NAME", f"a term of a sum, with `reward=sum`; {own_keys()}", TermConfig)


def entry(name: str, about: str, owner: type) -> Group:
    return Group(name, about, [], rows({"": owner}, [Option("", "", defaults_of(owner, "", Path("none"), []))]))


def own_keys() -> str:
    """Say which keys a term has by its kind, which mean the same there as in a reward of that kind."""
    of_kinds = [
        f"with `kind: {kind}` it has "
        + ", ".join(f"`{field.name}`" for field in dataclasses.fields(owner) if field.name != "name")
        for kind, owner in KINDS_OF_TERMS.items()
    ]
    return f"it also has the keys of its kind, as `reward=KIND` has them: {'; '.join(of_kinds)}"


def launcher(schema: Schema) -> Group:
    options = [
        Option(
            name,
            opening(schema.launchers / f"{name}.yaml"),
            defaults_of(owner, "hydra.launcher", Path("none"), files_of(schema.launchers, name)),
        )
        for name, owner in LAUNCHERS.items()
    ]
    return Group(
        "hydra.launcher",
        "how a sweep's jobs are started; `hydra/launcher=local`, the default, has no keys",
        options,
        rows(LAUNCHERS, options),
    )


def chosen_in(conf: Path, name: str) -> str | None:
    """Return the option of a group that conf/config.yaml chooses."""
    for line in (conf / "config.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"  - {name}: "):
            return line.rpartition(" ")[2]
    return None


def rows(owners: Mapping[str, type], options: Sequence[Option]) -> list[Row]:
    """Return the rows, those that all options have first."""
    made: dict[Any, list[str]] = {}
    fields: dict[Any, dataclasses.Field[Any]] = {}
    for option, owner in owners.items():
        for field in dataclasses.fields(owner):
            if not field.name.startswith("_") and fits(owner, field.name):
                key = (field.name, meaning(owner, field.name), field.metadata.get("bounds"))
                made.setdefault(key, []).append(option)
                fields.setdefault(key, field)
    defaults = {option.name: option.defaults for option in options}
    found = [
        row(owners[having[0]], fields[key], {each: defaults[each][key[0]] for each in having},
            () if len(having) == len(owners) else tuple(having))
        for key, having in made.items()
    ]  # fmt: skip
    return sorted(found, key=lambda each: bool(each.owners))


def fits(owner: type, leaf: str) -> bool:
    """Return whether a key has a meaning for its owner: a loss refuses the modifiers that do not fit it."""
    return leaf not in ALL_MODIFIERS or not issubclass(owner, PreferenceConfig) or leaf in owner.fits


def row(owner: type, field: dataclasses.Field[Any], defaults: Mapping[str, str], owners: tuple[str, ...]) -> Row:
    hint = typing.get_type_hints(owner)[field.name]
    bounds: Bounds | None = field.metadata.get("bounds")
    plain = (
        functools.reduce(operator.or_, [each for each in typing.get_args(hint) if each is not NONE])
        if _optional(hint)
        else hint
    )
    choices = {}
    if isinstance(plain, type) and issubclass(plain, Enum) and field.name != "name":
        choices = {each.name: meaning(plain, each.name) for each in plain}
    within = bounds.words() if bounds else ""
    words = ", ".join(filter(None, (in_words(plain), within, "or null" if _optional(hint) else "")))
    return Row(field.name, owners, defaults, words, within, choices, meaning(owner, field.name))


def _optional(hint: Any) -> bool:
    return NONE in typing.get_args(hint)


def missing(schema: Schema) -> list[str]:
    """Return one line for each thing of which nothing says what it means: groups, options, keys, derived defaults."""
    found = []
    for each in groups(schema):
        if not each.about:
            found.append(f"{each.name}: has no comment beside its field in Config")
        found += [f"{each.name}={option.name}: its yaml file opens with no comment" for option in each.options
                  if option.name and not option.about]  # fmt: skip
        for key in each.rows:
            name = f"{each.name}.{key.leaf}".lstrip(".")
            if not key.meaning:
                found.append(f"{name}: has no comment beside its field in the schema")
            found += [
                f"{name}={choice}: has no comment in its Enum" for choice, said in key.choices.items() if not said
            ]
            found += [f"{name}: is derived, and no comment beside its value in conf/ says how"
                      for default in {*key.defaults.values()} if not default and key.leaf != "name"]  # fmt: skip
    return found
