"""The tables of docs/coming_from.md, from the rules of `rlexp.convert`. `python -m tests.helpers.coming_from` writes
them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rlexp.convert.frameworks import FRAMEWORKS
from rlexp.convert.rules import Fate, Rule
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "coming_from.md"
WIDTH = 120
NEED_NOTHING = "These need nothing here, since no number depends on them or rlexp always does it:"


def with_tables(text: str) -> str:
    """Return the page with the table of each trainer between its marks."""
    for name, framework in FRAMEWORKS.items():
        table = "\n".join(
            line if line.startswith("|") else textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)
            for line in table_of(framework.rules).splitlines()
        )
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        found = re.search(rf"{re.escape(begin)}.*?{re.escape(end)}", text, re.S)
        assert found, f"{PAGE} has no place for {name}"
        text = text.replace(found[0], f"{begin}\n{table}\n{end}")
    return text


def table_of(rules: Sequence[Rule]) -> str:
    """Return the table of a page: their argument, ours, and what differs; then what needs nothing."""
    rows = ["| theirs | here | |", "| --- | --- | --- |"]
    for fate in (Fate.TAKEN, Fate.OTHER, Fate.INSTEAD, Fate.ABSENT):
        for rule in (rule for rule in rules if rule.fate is fate):
            ours = _listed(rule.key) if rule.key else Fate.ABSENT.value
            rows.append(f"| {_quoted(rule.names)} | {ours} | {_differs(rule)} |")
    elsewhere = {name for rule in rules if rule.fate is not Fate.NEEDLESS for name in rule.names}
    needless = {
        f"`{name}`" + (f" ({', '.join(rule.trainers)})" if name in elsewhere else "")
        for rule in rules
        if rule.fate is Fate.NEEDLESS
        for name in rule.names
    }
    return "\n".join(rows) + f"\n\n{NEED_NOTHING} {', '.join(sorted(needless))}.\n"


def _listed(key: str) -> str:
    """Quote each key that a rule names: `data.path` or `data.sources`."""
    parts = re.split(r"(, or |, | or )", key)
    return "".join(f"`{part}`" if place % 2 == 0 else part for place, part in enumerate(parts))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _differs(rule: Rule) -> str:
    of = ", ".join(rule.trainers)
    return ": ".join(filter(None, [of, rule.why]))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
