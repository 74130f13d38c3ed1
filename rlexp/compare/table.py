"""The comparison for the terminal: one line per run, and the verdict."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence

from rlexp.base.printable import printable
from rlexp.compare.page import Payload, RunCard

WIDTH = 110


def table(payload: Payload, width: int | None = None) -> str:
    """Return the table and the verdict. Columns that do not fit a terminal's width stand below the others."""
    runs, counted = payload.runs, any(run.tensors is not None for run in payload.runs)
    columns: list[tuple[str, Callable[[RunCard], str], bool]] = [  # with whether any run has a value
        ("run", lambda run: run.label, True),
        ("ring × dp", layout, True),
        ("status", lambda run: run.status, True),
        ("steps", lambda run: str(run.steps) if run.steps else "–", True),
        ("last loss", lambda run: number(run.last_loss, "{:.6f}"), True),
        ("last score", lambda run: number(run.last_score, "{:.4f}"), any(run.last_score is not None for run in runs)),
        ("held-out rows", lambda run: run.held_out or "–", any(run.held_out for run in runs)),
        ("difference", difference, True),
        ("tokens/s", lambda run: number(run.tokens_per_second, "{:,.0f}"), True),
        ("step", lambda run: number(run.step_seconds, "{:.3g} s"), True),
        ("efficiency", lambda run: number(run.efficiency, "{:.0%}"), True),
        ("predicted", lambda run: number(run.predicted_bytes, "{:.3g} GB", 1e-9),
         any(run.predicted_bytes is not None for run in runs)),
        # on CPU, memory is mostly the process's, and the tensors are the run's
        ("peak tensors",
         lambda run: peak(run.tensors.bytes, run.tensors.phase, run.tensors.rank) if run.tensors else "–", counted),
        ("peak resident", lambda run: peak(run.peak_bytes), counted),
        ("peak memory", lambda run: peak(run.peak_bytes, run.peak_phase, run.peak_rank), not counted),
    ]  # fmt: skip
    shown = [(name, cell) for name, cell, known in columns if known]
    rows = [[name for name, _ in shown], *([printable(cell(run)) for _, cell in shown] for run in runs)]
    lines = [line for block in blocks(rows, width) for line in ["", *block]][1:]
    least = min(WIDTH, width or WIDTH)
    notes = [f"! compared by force: {line}" for line in payload.forced] + [brief(note) for note in payload.notes]
    wrapped = [line for text in notes for line in textwrap.wrap(text, least, subsequent_indent="  ")]
    verdict = textwrap.wrap(payload.verdict.headline, least)
    return "\n".join([*lines, "", *wrapped, *([""] if wrapped else []), *verdict]) + "\n"


def blocks(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[list[str]]:
    """Yield the lines of tables that fit a width. Each begins with the first column, which names the runs."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    places = list(range(1, len(widths)))
    while places:
        taken, room = [0], (width or sys.maxsize) - widths[0]
        while places and (len(taken) == 1 or widths[places[0]] + 2 <= room):
            room -= widths[places[0]] + 2
            taken.append(places.pop(0))
        sizes = [widths[place] for place in taken]
        lines = []
        for row in rows:  # text to the left, numbers to the right
            cells = (row[at].ljust(widths[at]) if at < 3 else row[at].rjust(widths[at]) for at in taken)
            lines.append("  ".join(cells).rstrip())
        yield [lines[0], "  ".join("─" * size for size in sizes), *lines[1:]]


def brief(text: str) -> str:
    """Shorten a reason with a traceback to its first line and its error. The page has the rest."""
    head, traced, rest = text.partition("Traceback (most recent call last):")
    lines = [line for line in rest.splitlines() if line.strip() and not line.startswith(("Its log:", "It was last"))]
    return head + lines[-1] if traced and lines else text


def number(value: float | None, form: str, scale: float = 1) -> str:
    return "–" if value is None else form.format(value * scale)


def layout(run: RunCard) -> str:
    return f"{run.sizes['ring_size']} × {run.sizes['dp_size']}" if "dp_size" in run.sizes else "–"


def difference(run: RunCard) -> str:
    if run.baseline:
        return "baseline"
    upto = "" if run.compared_upto is None else f" to step {run.compared_upto}"
    return ("0 (equal)" if run.worst_difference == 0 else number(run.worst_difference, "{:.1e}")) + upto


def peak(size: int | None, phase: str | None = None, rank: int | None = None) -> str:
    """`0.382 GB (forward, r3)`, `4.9 MB`."""
    if size is None:
        return "–"
    shown = f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    return shown + (f" ({phase}, r{rank})" if phase else "")
