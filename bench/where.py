"""The table of docs/hardware.md: what has run where, made from what each section of docs/measured/ says of its machine.

    python -m bench.where        # writes the table; `bench.tables.put` does it after each measurement

A section says where and when it was measured in a paragraph of its own: "Measured 2026-11-25 at …, on 1 × NVIDIA H100
…", "Rehearsed on a CPU … 2026-11-27", "Predicted 2026-11-27 …".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.kept_rows import MEASURED, slug

ROOT = Path(__file__).parents[1]
PAGE = "hardware.md"
BEGIN, END = "<!-- where: begin -->", "<!-- where: end -->"
CPU, PREDICTED, SEVERAL = "CPU", "predicted", "several GPUs"
ALWAYS, NEVER, NOT_THERE = "always", "", "–"
REHEARSED = "rehearsed {}"  # by CPU ranks, in place of ranks that share a GPU
GPU = re.compile(r"\b(\d+|one) (?:× )?(?:NVIDIA )?([A-Z]+\d+\w*)\b")
ON_CPU = re.compile(r"Not run on a GPU|Rehearsed|\bCPU, by|\b0 GPUs")
DATE = re.compile(r"20\d\d-\d\d-\d\d")


@dataclass(frozen=True)
class Row:
    """What has run, and the sections with its dates, as `gpu.md#tests`; the first one is linked."""

    what: str
    sections: tuple[str, ...] = ()
    on_cpu: str | None = None  # in place of a date; `{}` is the date
    cells: tuple[tuple[str, str], ...] = ()  # by place: what a section does not date, or more than its date: `{}`


SHARED = "four ranks on one GPU: "
ROWS = (
    Row("all tests: rings of 8, two nodes, Slurm", on_cpu=ALWAYS),
    Row("tests of kernels and engines, ring of 1", ("gpu.md#tests",), on_cpu=ALWAYS),
    Row("memory and time of `zero1`", ("gpu.md#training",)),
    Row(f"{SHARED}engines", ("gpu.md#engines",), on_cpu=REHEARSED),
    Row(f"{SHARED}layouts, transports", ("gpu.md#rings",), on_cpu=REHEARSED),
    Row(f"{SHARED}adapters, references, losses", ("gpu.md#options",), on_cpu=REHEARSED),
    Row(f"{SHARED}resuming on another ring", ("gpu.md#commands",), on_cpu=REHEARSED),
    Row(f"{SHARED}`rlexp.verify`", ("gpu.md#verify",), on_cpu=REHEARSED),
    Row("`rlexp.verify`, ring of 1", ("verify.md#on-one-gpu",), on_cpu=ALWAYS,
        cells=(("one H200", "{}: 25 of 26"),)),
    Row("layouts, one rank at a time", ("benchmarks.md#attention-on-a-gpu",)),
    Row("speed beside TRL, ring of 1", ("beside_trl.md#8000-tokens", "beside_trl.md#hh")),
    Row("flash-attn 4, ring of 1", ("beside_trl.md#before",), cells=(("one H200", "2026-11, by hand"),)),
    Row("answers by vLLM",
        ("rollouts_gpu.md#curves", "rollouts_gpu.md#the-tokens-of-a-rollout"), on_cpu=REHEARSED),
    Row("`rlexp.generate`", on_cpu=ALWAYS),
    Row("recipes, with a small model", ("recipes.md#run-with-a-small-model",), on_cpu=ALWAYS),
    Row("flash-attn 2 and 3, ring-flash-attn"),
    Row("NCCL between several GPUs or nodes"),
)  # fmt: skip


def where(text: str) -> tuple[str, str] | None:
    """Return the place and the date that a paragraph says, if it says both."""
    dates = DATE.findall(text)
    if not dates:
        return None
    if text.startswith("Predicted"):
        return PREDICTED, max(dates)
    if ON_CPU.search(text):
        return CPU, max(dates)
    found = GPU.search(text)
    if found is None:
        return None
    return (f"one {found[2]}" if found[1] in ("1", "one") else SEVERAL), max(dates)


def said(section: str, folder: Path) -> dict[str, str]:
    """Return the last date of each place that a section and its parts name."""
    file, _, heading = section.partition("#")
    dates: dict[str, str] = {}
    for place, date in filter(None, map(where, paragraphs(folder / file, heading))):
        dates[place] = max(date, dates.get(place, ""))
    return dates


def paragraphs(page: Path, heading: str) -> Iterator[str]:
    """Yield the paragraphs under a heading, up to the next one of its level."""
    level, words = 0, list[str]()
    for line in (*page.read_text(encoding="utf-8").splitlines(), ""):
        depth = len(line) - len(line.lstrip("#"))
        if words and (depth or not line.strip() or line.startswith("<!--")):
            yield " ".join(words).replace("**", "")
            words.clear()
        if level and 0 < depth <= level:
            return
        if depth and slug(line) == heading:
            level = depth
        elif level and not depth and line.strip() and not line.startswith("<!--"):
            words.append(line.strip())
    if not level:
        raise SystemExit(f"{page}: has no section {heading}. Correct ROWS in bench/where.py.")


def table(folder: Path | None = None, rows: Sequence[Row] = ROWS) -> str:
    folder = folder or ROOT / "docs" / MEASURED
    found = [[said(each, folder) for each in row.sections] for row in rows]
    cards = {place for row in found for each in row for place in each if place.startswith("one ")}
    places = [CPU, *sorted(cards | {"one H100", "one H200"}), SEVERAL]
    lines = [f"| what | {' | '.join(places)} |", f"| --- |{' --- |' * len(places)}"]
    for row, dates in zip(rows, found, strict=True):
        what = f"[{row.what}]({MEASURED}/{row.sections[0]})" if row.sections else row.what
        latest = {place: max((each[place] for each in dates if place in each), default=NEVER) for place in places}
        on_cpu = row.on_cpu if latest[CPU] or row.on_cpu != REHEARSED else None
        texts = {CPU: on_cpu or latest[CPU] or NOT_THERE, **dict(row.cells)}
        cells = (texts.get(place, latest[place]).format(latest[place]) for place in places)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def refresh(page: Path) -> None:
    """Write the table into its page, if it has a place for it."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        made = table(page.parent / MEASURED)
        page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh(ROOT / "docs" / PAGE)
