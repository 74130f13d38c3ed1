"""The tables of docs/coming_from.md, from the rules of `rlexp.convert`. `python -m tests.helpers.coming_from` writes
them."""

from __future__ import annotations

import re
import textwrap

from rlexp.convert.frameworks import FRAMEWORKS
from rlexp.convert.rules import table_of
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "coming_from.md"
WIDTH = 120


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


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
