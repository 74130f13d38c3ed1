"""What every rank of a run is doing, where no death can hide it: `memory.jsonl`, a line of fixed width per rank.

A rank that is killed for its memory has no last word. So each writes its step, its phase and its peaks so far as it
goes, into the place that is its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTH = 512  # bytes of a line, with its end
FILE = "memory.jsonl"
BETWEEN = "between steps"  # the phase


class Whereabouts:
    """One rank's line. A disk that is full, or gone, ends no training."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT, 0o644)
        self._rank = rank

    def tell(self, **facts: Any) -> None:
        line = json.dumps({"rank": self._rank, "at": time.time(), **facts})[: WIDTH - 1].ljust(WIDTH - 1) + "\n"
        try:
            os.pwrite(self._file, line.encode(), self._rank * WIDTH)
        except OSError:
            return


def begin(run_dir: Path) -> None:
    """Before the ranks start: what an earlier world wrote is not this one's."""
    (run_dir / FILE).unlink(missing_ok=True)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The lines that are there, by rank."""
    found = []
    try:
        text = (run_dir / FILE).read_bytes()
    except OSError:
        return []
    for start in range(0, len(text), WIDTH):
        try:
            line = json.loads(text[start : start + WIDTH])
        except ValueError:  # a rank that has not written yet
            continue
        if isinstance(line, dict) and {"rank", "step", "phase", "peaks"} <= line.keys():
            found.append(line)
    return found


def deaths(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ranks that could not allocate, and lived to say so."""
    return [line for line in read(run_dir) if "died" in line]


def last_seen(run_dir: Path, rank: int) -> str:
    """`in step 3, in its forward phase`, or nothing where the rank had not begun."""
    return next((seen(line) for line in read(run_dir) if line["rank"] == rank), "")


def seen(line: Mapping[str, Any]) -> str:
    if line["phase"] == BETWEEN:
        return f"after step {line['step']}"
    step = f"in step {line['step']}, " if line["step"] else ""
    return f"{step}in its {line['phase']} phase"
