"""The tables of docs/keys.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from rlexp.config.schema.keys import all_keys
from tests.helpers.keys.rows import Group, Row, Schema, groups
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "keys.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
FEW = 3  # defaults of a key that its row names; where options have more, the table of options shows them


def page(schema: Schema, file: Path = PAGE) -> str:
    """Return the page with the tables of this schema."""
    head, rest = file.read_text(encoding="utf-8").split(BEGIN)
    return head + BEGIN + tables(schema) + END + rest.partition(END)[2]


def tables(schema: Schema) -> str:
    found = list(groups(schema))
    code = coder(set(all_keys()), {each.name for each in found if each.options})
    tops = [title(each) for each in found if not within(each)]
    parts = [" · ".join(f"[{each}](#{each.replace(' ', '-').replace('.', '')})" for each in tops)]
    for each in found:
        about = each.about or ""
        parts += [
            f"{'###' if within(each) else '##'} {title(each)}",
            code(f"{about[:1].upper()}{about[1:]}."),
            *options_table(each, code),
            keys_table(each, code),
        ]
    return "\n\n".join(parts) + "\n"


def title(each: Group) -> str:
    return each.name or "top level"


def within(each: Group) -> bool:
    """Return whether the group is one that people name inside another."""
    return each.name.endswith(".NAME")


def options_table(each: Group, code: Callable[[str], str]) -> list[str]:
    """Return a table of the options, with the keys whose defaults are many. None where there is no choice."""
    if len(each.options) < 2:
        return []
    group = each.name.replace("hydra.launcher", "hydra/launcher")
    many = [row for row in each.rows if not is_choice(each, row) and len({*row.defaults.values()}) > FEW]
    head = [f"`{group}=`", "what it is", *(f"`{row.leaf}`" for row in many)]
    lines = [
        [
            f"`{option.name}`" + " (default)" * (option.name == each.chosen),
            code(first_sentence(option.about)),
            *(row.defaults.get(option.name, "—") for row in many),
        ]
        for option in each.options
    ]
    return [table(head, lines)]


def keys_table(each: Group, code: Callable[[str], str]) -> str:
    some = any(row.owners for row in each.rows)
    head = ["key", *["only with"] * some, "default", "values", "meaning"]
    prefix = f"{each.name}." if each.name else ""
    lines = [
        [
            f"`{prefix}{row.leaf}`",
            *[owners(each, row)] * some,
            code(default(each, row)),
            code(values(each, row)),
            code(row.meaning or ""),
        ]
        for row in each.rows
    ]
    return table(head, lines)


def owners(each: Group, row: Row) -> str:
    """Return the options that have a key; where these are most of them, the others."""
    others = [option.name for option in each.options if option.name not in row.owners]
    if row.owners and len(row.owners) > len(others) > 0:
        return f"all but {listed(others)}"
    return listed(row.owners)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def default(each: Group, row: Row) -> str:
    """Return the default; where options differ, the most frequent one, and the others by their options."""
    by_default: dict[str, list[str]] = {}
    for option, said in row.defaults.items():
        by_default.setdefault(said, []).append(option)
    if is_choice(each, row):
        return "the option's name"
    if len(by_default) > FEW:
        return "by option: see above"
    frequent, *others = sorted(
        by_default, key=lambda said: (-len(by_default[said]), each.chosen not in by_default[said])
    )
    return frequent + "".join(f"<br>with {listed(by_default[said])}: {said}" for said in others)


def values(each: Group, row: Row) -> str:
    if is_choice(each, row):
        return "set by choosing an option"
    return "<br>".join(f"`{choice}`: {said}" for choice, said in row.choices.items()) or row.values


def is_choice(each: Group, row: Row) -> bool:
    return row.leaf == "name" and each.chosen is not None


def first_sentence(text: str) -> str:
    return re.split(r"(?<!Dr\.)(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def coder(keys: set[str], named: set[str]) -> Callable[[str], str]:
    """Return a function that marks keys, `key=value` and `group=option` in a text as code, where they are not yet."""
    given, whole = (
        "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        for names in (keys | named, {key for key in keys if "." in key})
    )
    word = re.compile(rf"(?<![\w./`])(?:(?:{given})=[\w*|/]+|(?:{whole})(?![\w.]*\w))")

    def code(text: str) -> str:
        parts = text.split("`")  # every second one is code
        return "`".join(part if at % 2 else word.sub(r"`\g<0>`", part) for at, part in enumerate(parts))

    return code


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
