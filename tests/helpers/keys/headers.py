"""The comments in conf/loss and conf/parallel that list the keys of their options, with defaults and meanings."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.helpers.keys.page import is_choice
from tests.helpers.keys.rows import Group, Row, Schema, group

SHOWN = ("loss", "parallel")  # groups whose files list their keys
FIRST = "# Keys, with their defaults (docs/keys.md has those of all groups):"
BY_RLEXP = "set by rlexp: "  # how the meaning of a key begins that nobody sets
WIDTH = 120
LONG = 40  # characters of a key with its default, beyond which its meaning does not move that of the others


def headers(schema: Schema) -> dict[Path, str]:
    """Return the whole text of each file whose comment lists its keys."""
    return {
        schema.conf / each.name / f"{option.name}.yaml": with_keys(schema, each, option.name)
        for each in (group(schema, name) for name in SHOWN)
        for option in each.options
    }


def with_keys(schema: Schema, each: Group, option: str) -> str:
    lines = (schema.conf / each.name / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    about = [line for line in lines[: lines.index(FIRST)] if line] if FIRST in lines else []
    ends = next(at for at, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join([*(about or lines[:ends]), FIRST, *listed(each, option), *lines[ends:]]) + "\n"


def listed(each: Group, option: str) -> list[str]:
    """Return a line for each key that can be set: as yaml has it, and what it means behind it."""
    keys = {
        f"#   {row.leaf}: {row.defaults[option].replace('`', '')}": meaning(row)
        for row in each.rows
        if row.defaults.get(option, "").startswith("`")  # else it is derived
        and not is_choice(each, row)
        and not (row.meaning or "").startswith(BY_RLEXP)
    }
    start = max((len(key) for key in keys if len(key) <= LONG), default=0) + 3
    return [
        line
        for key, said in keys.items()
        for line in textwrap.wrap(
            said,
            WIDTH,
            initial_indent=f"{key}   ".ljust(start),
            subsequent_indent="#".ljust(start),
            break_on_hyphens=False,
        )
    ]


def meaning(row: Row) -> str:
    """Return the meaning, with the options or bounds behind it."""
    allowed = f"one of {', '.join(row.choices)}" if row.choices else row.bounds
    return (row.meaning or "").replace("`", "") + (f" ({allowed})" if allowed else "")
