"""Show a folder's jobs: to people as a table with what went wrong below it, and to scripts as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlexp.base.durations import duration
from rlexp.base.printable import printable
from rlexp.compare.table import number
from rlexp.compare.table import peak as shown_peak
from rlexp.launch import rank_progress
from rlexp.run_files import evaluations
from rlexp.status.state import ILL, LOST, WELL
from rlexp.status.view import JobRow, Look
from rlexp.training.sinks.legible import cut

STYLES = {"running": "cyan", "finished": "green", "failed": "bold red", LOST: "bold red", "stopped": "yellow",
          "waiting": "dim", "skipped": "dim"}  # fmt: skip
# The order of importance, if a terminal has fewer lines than there are jobs.
FIRST = (*ILL, "running", "stopped", "waiting", "skipped", "finished")
LONG = 10.0  # seconds of a step after which it is said how far it is
BAR, LABEL, NAMES = 14, 14, 3  # columns of a bar, the fewest columns of a label, the most labels of one reason
UNLIMITED = 100_000  # columns where the output is a pipe


@dataclass(frozen=True)
class Column:
    name: str
    cell: Callable[[JobRow], str]
    least: int  # if columns do not fit, those with the highest number are left out first
    right: bool = True


BARS = Column("", lambda row: " " * BAR, 5, right=False)  # noqa: ARG005


def columns(look: Look, *, bars: bool) -> list[Column]:
    """Return the columns that have a value for some row."""
    rows = look.rows
    slurm = any(row.job_id for row in rows)
    scored, held_out = any(row.curve.score is not None for row in rows), any(row.held_out for row in rows)
    counted_tensors, requeued = any(row.tensors is not None for row in rows), any(row.requeues for row in rows)
    every = [
        (True, Column("run", lambda row: row.label, 0, right=False)),
        (True, Column("status", status, 0, right=False)),
        (True, Column("steps", steps, 1)),
        (bars, BARS),
        (True, Column("last loss", lambda row: number(row.curve.loss, "{:.6f}"), 3)),
        (scored, Column("last score", lambda row: number(row.curve.score, "{:.4f}"), 4)),
        (held_out, Column("held-out rows", lambda row: evaluations.in_words(row.held_out) or "–", 5)),
        (True, Column("tokens/s", lambda row: number(row.curve.tokens_per_second, "{:,.0f}"), 7)),
        (counted_tensors, Column("peak tensors", lambda row: memory(row.tensors), 8)),
        (True, Column("peak memory", lambda row: memory(row.peak), 8)),
        (True, Column("time left", lambda row: time_of(row.seconds_left), 2)),
        (requeued, Column("requeued", lambda row: f"{len(row.requeues)} ×" if row.requeues else "–", 10)),
        (slurm, Column("Slurm's limit", lambda row: time_of(limit(row)), 6)),
        (slurm, Column("job", lambda row: row.job_id or "–", 9)),
        (slurm, Column("nodes", lambda row: (row.slurm.nodes if row.slurm else "") or "–", 11, right=False)),
    ]
    return [column for known, column in every if known]


def status(row: JobRow) -> str:
    waits = row.state == "waiting" and row.slurm is not None and row.slurm.reason
    return f"waiting ({row.slurm.reason})" if waits and row.slurm else row.state


def steps(row: JobRow) -> str:
    if not row.steps:
        return str(row.curve.step or "–")
    return f"{row.curve.step}/{row.steps} ({row.curve.step / row.steps:.0%})"


def limit(row: JobRow) -> float | None:
    return row.slurm.seconds_left if row.slurm is not None and row.state == "running" else None


def time_of(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def memory(peak: tuple[int, str, int] | None) -> str:
    return "–" if peak is None else shown_peak(*peak)


def page(look: Look, width: int, *, lines: int | None = None, bars: bool = False) -> RenderableType:
    """Draw a page of at most `lines` lines and `width` columns."""
    rows = chosen(look.rows, None if lines is None else max(1, lines - 4))
    left = [row for row in look.rows if row not in rows]
    states = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in left).items())
    parts: list[RenderableType] = [table(look, rows, width, bars=bars)]
    if left:
        parts.append(Text(cut(f"… and {len(left)} more: {states}", width), "dim"))
    below = remarks(look)
    if lines is not None:  # the last page shows what does not fit here
        below = below[: max(0, lines - len(rows) - 4)]
    return Group(*parts, *([Text()] if below else []), *map(Text, below))


def table(look: Look, rows: Sequence[JobRow], width: int, *, bars: bool) -> Table:
    shown = fitting(columns(look, bars=bars), look.rows, width)
    widths = _widths(shown, look.rows)
    room = max(1, width - sum(widths[1:]) - 2 * len(widths[1:]))  # for labels
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in shown:
        justify: Any = "right" if column.right else "left"
        drawn.add_column(column.name, justify=justify, no_wrap=True, header_style="")
    for row, label in zip(rows, shortened(rows, room), strict=True):
        drawn.add_row(Text(label), *(_cell(column, row) for column in shown[1:]))
    return drawn


def _cell(column: Column, row: JobRow) -> RenderableType:
    if column is BARS:
        style = STYLES.get(row.state, "")
        bar = ProgressBar(row.steps, row.curve.step, width=BAR, complete_style=style, finished_style=style)
        return bar if row.steps else Text()
    return Text(printable(column.cell(row)), STYLES.get(row.state, "") if column.name == "status" else "")


def shortened(rows: Sequence[JobRow], room: int) -> list[str]:
    """Shorten labels so that they fit and still differ: to their beginnings, or ends, or else to the folders' names."""
    labels = [row.label for row in rows]
    for end in (False, True):
        short = [cut(label, room, end=end) for label in labels]
        if len(set(short)) == len(set(labels)):
            return short
    return [cut(row.folder.name, room) for row in rows]


def fitting(wanted: Sequence[Column], rows: Sequence[JobRow], width: int) -> list[Column]:
    """Leave out the least important columns until the others fit. A label is cut before a column is left out."""
    kept = list(wanted)
    while any(column.least for column in kept):
        widths = _widths(kept, rows)
        if min(widths[0], LABEL) + sum(widths[1:]) + 2 * (len(kept) - 1) <= width:
            break
        kept.remove(max(kept, key=lambda column: column.least))
    return kept


def _widths(shown: Sequence[Column], rows: Sequence[JobRow]) -> list[int]:
    return [max(map(cell_len, (column.name, *map(column.cell, rows)))) for column in shown]


def chosen(rows: Sequence[JobRow], room: int | None) -> list[JobRow]:
    """Return the most important rows that fit, in their order."""
    if room is None or len(rows) <= room:
        return list(rows)
    first = sorted(rows, key=lambda row: FIRST.index(row.state) if row.state in FIRST else len(FIRST))[:room]
    return [row for row in rows if row in first]


def remarks(look: Look) -> list[str]:
    """Say which jobs did not end well or wait in vain, and why. Jobs with the same reason share a line."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in look.rows:
        if row.why or row.state not in WELL:
            seen = last_seen(row.ranks) if row.state in ILL else ""
            reasons.setdefault((row.state, row.why, seen), []).append(row.label)
        elif row.quiet is not None:
            reasons.setdefault((row.state, f"no sign of life for {duration(row.quiet)}", ""), []).append(row.label)
    lines = [line for row in look.rows if (line := long_step(row))]
    for (state, why, seen), labels in reasons.items():
        lines.append(f"{names(labels)} {'is' if len(labels) == 1 else 'are'} {state}{f': {why}' if why else ''}")
        lines += [f"  {seen}"] if seen else []
    if look.silent:
        lines.append(f"Slurm gave no answer, so this is what the folders say ({look.silent.rstrip('.')})")
    return lines


def long_step(row: JobRow) -> str | None:
    """Say how far a running job is within its step, if the step is long."""
    now = time.time()
    if row.state != "running" or not row.ranks or not row.ranks[0].keys() >= rank_progress.WITHIN:
        return None
    if rank_progress.seconds_in_step(row.ranks[0], now) < LONG:
        return None
    return f"{row.label} is in step {row.ranks[0]['step']}: {rank_progress.within_step(row.ranks[0], now)}"


def names(labels: Sequence[str]) -> str:
    if len(labels) <= NAMES:
        return "; ".join(labels)
    return f"{'; '.join(labels[: NAMES - 1])} and {len(labels) - NAMES + 1} more"


def last_seen(ranks: Sequence[dict[str, Any]]) -> str:
    """Say what each rank did last. Ranks that did the same share an entry."""
    doing: dict[str, list[int]] = {}
    for rank in ranks:
        died = f", where it died: {rank['died']}" if "died" in rank else ""
        doing.setdefault(f"{rank_progress.seen(rank)}{died}", []).append(rank["rank"])
    parts = [f"ranks {ranges(alike)} {what.replace('in its', 'in their', 1)}" if len(alike) > 1 else
             f"rank {alike[0]} {what}" for what, alike in doing.items()]  # fmt: skip
    return f"last seen: {'; '.join(parts)}" if parts else ""


def ranges(numbers: Sequence[int]) -> str:
    """`0–3, 5`."""
    spans: list[list[int]] = []
    for each in sorted(numbers):
        if spans and each == spans[-1][1] + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def text(look: Look) -> str:
    """Where there is no terminal: whole, and without control codes."""
    console = Console(width=UNLIMITED, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(page(look, UNLIMITED))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def plain(look: Look) -> dict[str, Any]:
    jobs = [_plain(row) for row in look.rows]
    return {"folder": look.title, "live": look.live, "slurm_gave_no_answer": look.silent or None, "jobs": jobs}


def _plain(row: JobRow) -> dict[str, Any]:
    peaks = {f"{kind}peak_{name}": value for kind, peak in (("", row.peak), ("tensors_", row.tensors))
             for name, value in zip(("bytes", "phase", "rank"), peak or (None, None, None), strict=True)}  # fmt: skip
    return {
        "label": row.label, "folder": str(row.folder), "status": row.state, "reason": row.why or None,
        "step": row.curve.step, "steps": row.steps, "last_loss": row.curve.loss, "last_score": row.curve.score,
        "held_out": dict(row.held_out), "tokens_per_second": row.curve.tokens_per_second,
        "step_seconds": row.curve.step_seconds, "seconds_left": row.seconds_left, "seconds_quiet": row.quiet,
        **peaks, "ranks": row.ranks, "requeues": row.requeues, "job_id": row.job_id,
        "slurm": None if row.slurm is None else dataclasses.asdict(row.slurm),
    }  # fmt: skip
