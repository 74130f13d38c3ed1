"""What the pages of docs/ show: their commands, and the files that they ask a reader to write."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.paths import ROOT

INDEX = ROOT / "docs" / "README.md"
PAGES = [
    ROOT / "README.md",
    INDEX,
    *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "convert").glob("*.md")} - {INDEX}),
]
MEASURED = sorted((ROOT / "docs" / "measured").glob("*.md"))  # the long tables, and what wrote them


def scripts(page: Path) -> list[str]:
    """Return the blocks of commands, in the order in which a reader types them."""
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Return the commands one by one. One that goes on over lines, or reads the lines below it, is one."""
    one = re.compile(r"^[^#\s][^\n]*<<'(\w+)'\n[\s\S]*?^\1$|^[^#\s](?:[^\n\\]|\\[\s\S])*", re.MULTILINE)
    return [found[0].replace("\\\n", "") for script in scripts(page) for found in one.finditer(script)]


def files(page: Path) -> dict[str, str]:
    """Return the files that the page has a reader write, by name: the line before a block of text names each."""
    blocks = r"`([\w/.]+\.(?:yaml|py))`[^`\n]*\n\n```(?:yaml|python)\n(.*?)^```"
    return dict(re.findall(blocks, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE))
