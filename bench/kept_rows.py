"""Rows of a measured table that a page keeps: copied from docs/measured/NAME.md into a page of docs/, between two
markers.

A page marks them with the measured page and the heading that the table stands under:

    <!-- from measured/gpu.md#the-longest-pair: begin -->
    | engine | ring 1 | ring 8 |
    | --- | ---: | ---: |
    | `zero3` | 50,176 | 401,408 |
    <!-- from measured/gpu.md#the-longest-pair: end -->

The README marks them as `docs/measured/gpu.md`. `bench.tables.put` refreshes them whenever it has written a measured
page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MEASURED = "measured"  # the folder
README = "README.md"
KEPT = re.compile(
    r"(?P<begin><!-- from (?P<place>(?:docs/)?measured/[\w-]+\.md#[\w-]+): begin -->\n)"
    r"(?P<rows>.*?\n)"
    r"(?P<end><!-- from (?P=place): end -->)",
    re.DOTALL,
)
# Measured pages whose page has another name.
OF_PAGE = {"convert.md": "coming_from.md", "gpu.md": "hardware.md", "rollouts_gpu.md": "rollouts_inside.md"}
Rows = list[str]  # lines of a table; the first two are its head


def page_of(measured: Path) -> Path:
    """Return the page that explains a measured page; for any other page, the page itself."""
    if measured.parent.name != MEASURED:
        return measured
    return measured.parent.parent / OF_PAGE.get(measured.name, measured.name)


def refresh(measured: Path) -> list[str]:
    """Copy the rows that other pages keep of a measured page. Return what was not found: such a table stays as it
    was."""
    if (page := page_of(measured)) == measured:
        return []
    problems: list[str] = []
    for each in (*sorted(page.parent.glob("*.md")), page.parent.parent / README):
        if each.exists() and f"{MEASURED}/{measured.name}#" in each.read_text(encoding="utf-8"):
            text, more = refreshed(each)
            each.write_text(text, encoding="utf-8")
            problems += more
    return problems


def refreshed(page: Path) -> tuple[str, list[str]]:
    """Return the page's text with the rows as they are measured now, and what is no longer there."""
    problems: list[str] = []

    def copied(block: re.Match[str]) -> str:
        file, _, heading = block["place"].partition("#")
        measured = table_under(page.parent / file, heading)
        kept = block["rows"].splitlines()
        found = [find(cells, measured) for cells in filled(kept)[2:]]
        problems.extend(
            f"{page}: keeps a row that {block['place']} does not have, or has several times: {row}"
            for row, there in zip(kept[2:], found, strict=True)
            if there is None
        )
        if not measured or None in found:
            return block[0]
        rows = "".join(f"{row}\n" for row in [*measured[:2], *filter(None, found)])
        return f"{block['begin']}{rows}{block['end']}"

    return KEPT.sub(copied, page.read_text(encoding="utf-8")), problems


def table_under(page: Path, heading: str) -> Rows:
    """Return the first table under a heading, which is named as a link to it is. No table: no rows."""
    rows: Rows = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines() if page.exists() else ():
        if line.startswith("#"):
            inside = slug(line) == heading
        elif inside and line.startswith("|"):
            rows.append(line)
        if rows and not line.startswith("|"):
            break
    return rows


def slug(heading: str) -> str:
    """Return a heading as GitHub names it in a link."""
    return re.sub(r"[^\w -]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def find(wanted: Sequence[str], measured: Rows) -> str | None:
    """Find a row by as few of its first cells as only one measured row has."""
    left = list(zip(measured, filled(measured), strict=True))[2:]
    for place, cell in enumerate(wanted):
        left = [(line, cells) for line, cells in left if cells[place : place + 1] == [cell]]
        if len(left) == 1:
            return left[0][0]
    return None


def filled(table: Rows) -> list[list[str]]:
    """Return the cells of a table's rows. An empty cell repeats the cell above it."""
    rows: list[list[str]] = []
    for line in table:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        above = rows[-1] if rows else cells
        rows.append([cell or (above[place] if place < len(above) else "") for place, cell in enumerate(cells)])
    return rows
