"""A preview for the terminal: with colours where there are any, as wide as the terminal is."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from rlexp.data import tables
from rlexp.data.facts import Lengths, Piece, Preview, RowPart, ShownSample
from rlexp.data.tables import Table, one_line, visible

WIDTH = 110  # where there is no terminal
LINES = 40  # of a part of a sample, at most
BLOCKS = " ▁▂▃▄▅▆▇█"
# Columns that a narrow terminal leaves out, the highest first.
LEAST = {"5 %": 3, "25 %": 2, "75 %": 2, "99 %": 1, "ranks": 3, "replicas": 2}
TRAINED, SPECIAL, UNTRAINED = "bold green", "magenta", "dim"


def show(facts: Preview) -> None:
    """Print a preview to stdout."""
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown"):
        console = Console(highlight=False)
        colours = console.color_system is not None and not console.no_color
        console.print(page(facts, console.width, colours=colours))
    else:
        sys.stdout.write(text(facts))


def text(facts: Preview, width: int = WIDTH) -> str:
    """Return a preview as it is printed where there is no terminal."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False, highlight=False)
    with console.capture() as captured:
        console.print(page(facts, width, colours=False))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def page(facts: Preview, width: int, *, colours: bool) -> RenderableType:
    parts: list[RenderableType] = []

    def section(title: str, *inside: RenderableType) -> None:
        parts.extend([Text(title, "bold"), Padding(Group(*inside), (0, 0, 1, 2))])

    inner = width - 2
    parts.append(
        Text(f"{facts.data}, loss={facts.loss}, model {one_line(facts.model)}, data.max_length={facts.max_length:,}\n")
    )
    epoch = sum(each.per_epoch or 0 for each in facts.sources)
    several = sum(not each.held_out for each in facts.sources) > 1
    lines = [line for each in facts.sources for line in tables.source_lines(each, epoch, several=several)]
    section("Sources", *map(Text, lines))
    if facts.reasons:
        section("Not taken as read", *reasons(facts))
    if facts.lengths:
        section("Lengths", *lengths(facts, inner))
    if facts.sharing is not None:
        section("Shared prompts", *map(Text, tables.sharing(facts)))
    if facts.steps is not None:
        section("Steps", *map(Text, tables.steps(facts)))
        section("Rings", drawn(tables.rings(facts), inner), *map(Text, tables.about_rings(facts)))
    if facts.samples:
        section("Samples", legend(colours=colours), *samples(facts.samples, inner, colours=colours))
    parts.append(Text(one_line(facts.verdict), "bold red" if facts.problems else "bold green"))
    return Group(*parts)


def reasons(facts: Preview) -> list[RenderableType]:
    table = tables.reasons(facts)
    grid = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for what, count, first in table.rows:
        grid.add_row(Text(count), Text(f"{what}; first: {first}" if first != "–" else what))
    return [grid, *map(Text, tables.lists(facts))]


def lengths(facts: Preview, width: int) -> list[RenderableType]:
    graphs = []
    room = max(len(each.part) for each in facts.lengths)
    for each in facts.lengths:
        bars = sparkline(each, max(8, width - room - 24))
        graphs.append(Text.assemble(f"{each.part.rjust(room)} ", (f"{each.edges[0]:,} ", "dim"), (bars, "cyan"),
                                    (f" {each.end}", "dim")))  # fmt: skip
    return [drawn(tables.lengths(facts), width), *graphs, Text(tables.limits(facts))]


def sparkline(each: Lengths, width: int) -> str:
    """Return a line of bars. Every bar that counts something is seen."""
    bars = list(each.bars)
    fold = -(-len(bars) // width)
    bars = [sum(bars[place : place + fold]) for place in range(0, len(bars), fold)]
    most = max(bars)
    return "".join(BLOCKS[0 if not bar else max(1, round(8 * bar / most))] for bar in bars)


def drawn(table: Table, width: int) -> RichTable:
    """Draw a table of numbers; the least important columns are left out if they do not fit."""
    kept = list(range(len(table.head)))
    widths = [max(cell_len(row[place]) for row in (table.head, *table.rows)) for place in kept]
    while sum(widths[place] + 2 for place in kept) + 2 > width:
        least = max(kept, key=lambda place: LEAST.get(table.head[place], 0))
        if table.head[least] not in LEAST:
            break
        kept.remove(least)
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    if table.strong is not None:
        grid.add_column("", no_wrap=True)
    for place in kept:
        justify: Any = "left" if place in table.text else "right"
        grid.add_column(table.head[place], justify=justify, header_style="", overflow="fold")
    for number, row in enumerate(table.rows):
        mark = [] if table.strong is None else [Text("▸" if number == table.strong else "")]
        grid.add_row(*mark, *(Text(row[place]) for place in kept), style="bold" if number == table.strong else "")
    return grid


# ---- samples ----


def legend(*, colours: bool) -> Text:
    if colours:
        return Text.assemble(("trained on", TRAINED), ", ", ("special token", SPECIAL), ", ",
                             ("not trained on", UNTRAINED))  # fmt: skip
    return Text("⟦trained on⟧, everything else is not; ↵ is a newline")


def samples(shown: Sequence[ShownSample], width: int, *, colours: bool) -> Iterator[RenderableType]:
    for number, sample in enumerate(shown, 1):
        label = "" if sample.label is None else f", label {str(sample.label).lower()}"
        expected = "" if sample.expected is None else f", expected answer {one_line(sample.expected)!r}"
        yield Text(f"\n{number}. {one_line(sample.origin)}{label}{expected}", "bold")
        for part in sample.parts:
            trained = f", {part.trained:,} trained on" if part.name != "prompt" else ""
            yield Text(f"{part.name}: {part.tokens:,} tokens{trained}", "dim" if colours else "")
            yield Padding(part_text(part, width - 2, colours=colours), (0, 0, 0, 2))


def part_text(part: RowPart, width: int, *, colours: bool) -> Text:
    """Write a part with its trained tokens marked."""
    written = Text(overflow="fold")
    inside = False
    alike = itertools.groupby(shortened(part.pieces, width, LINES), lambda piece: (piece.trained, _style(piece)))
    for (trained, style), pieces in alike:  # together, so that no escape code stands within a character
        if not colours and trained is not inside:
            _mark(written, opens=trained)
            inside = trained
        written.append("".join(map(_shown, pieces)), style if colours else "")
    if written.plain.endswith("\n"):
        written.right_crop(1)
    if inside:
        _mark(written, opens=False)
    return written


def _shown(piece: Piece) -> str:
    return f"\n… {piece.hidden:,} tokens …\n" if piece.hidden else visible(piece.text)


def _style(piece: Piece) -> str:
    if piece.hidden:
        return "italic"
    if piece.special:
        return f"bold {SPECIAL}" if piece.trained else SPECIAL
    return TRAINED if piece.trained else UNTRAINED


def _mark(written: Text, *, opens: bool) -> None:
    """Write the sign where trained tokens begin or end; an end stands before a newline that is trained on."""
    if opens or not written.plain.endswith("\n"):
        written.append("⟦" if opens else "⟧")
        return
    written.right_crop(1)
    written.append("⟧\n")


def shortened(pieces: Sequence[Piece], width: int, lines: int) -> list[Piece]:
    """Leave out the middle of what takes more than so many lines."""
    if sum(_lines(pieces, width)) <= lines and not any(piece.hidden for piece in pieces):
        return list(pieces)
    head = _fitting(pieces, width, lines // 2)
    tail = _fitting(pieces[head:][::-1], width, lines - lines // 2)
    left = pieces[head : len(pieces) - tail]
    hidden = sum(piece.hidden or len(piece.ids) for piece in left)
    if not hidden:
        return list(pieces)
    return [*pieces[:head], Piece("", (), left[0].trained, hidden=hidden), *pieces[len(pieces) - tail :]]


def _fitting(pieces: Sequence[Piece], width: int, lines: float) -> int:
    """Return how many pieces take at most so many lines; what was left out before stays so."""
    used = 0.0
    for place, (piece, taken) in enumerate(zip(pieces, _lines(pieces, width), strict=True)):
        used += taken
        if used > lines + 1e-6 or piece.hidden:
            return place
    return len(pieces)


def _lines(pieces: Sequence[Piece], width: int) -> list[float]:
    """Return how many lines each piece takes, nearly: its newlines, and its share of the width."""
    counts, column = [], 0
    for piece in pieces:
        before, taken = column, 0.0
        for place, line in enumerate(visible(piece.text).split("\n")):
            if place:
                taken += 1 - before / width
                column = before = 0
            column += cell_len(line)
            taken += (column - before) / width
            before = column
        counts.append(taken)
    return counts
