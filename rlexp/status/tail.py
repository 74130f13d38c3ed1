"""The end of a curve while it is written: the last rows of metrics.jsonl, without reading those before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.base import files, plain_json
from rlexp.run_files.curve_distance import SAMPLED, SCORE

ROWS = 50  # the rows from which pace and speed are computed
BYTES, MOST = 1 << 16, 1 << 22  # bytes read at first, and at most, if the first do not have all values


@dataclass(frozen=True)
class Curve:
    """The state of a curve. All but the step may be missing from a row."""

    step: int = 0
    loss: float | None = None
    score: float | None = None  # of a run that samples: that of its last rollout
    tokens_per_second: float | None = None
    step_seconds: float | None = None


def read(path: Path) -> Curve:
    size = BYTES
    while True:
        rows, whole = last_rows(path, size)
        sampled = bool(rows) and any(name.startswith(SAMPLED) for name in rows[-1])
        lacking = not rows or (sampled and _latest(rows, SCORE) is None)
        if whole or size >= MOST or not lacking:
            return _curve(rows)
        size *= 8


def last_rows(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the whole rows in a file's last bytes, and whether these are all of its rows."""
    try:
        with files.opened(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(start)
            lines = file.read(size).split(b"\n")
    except OSError:
        return [], True
    rows = []
    for line in lines[1 if start else 0 : -1]:
        try:
            row = plain_json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows, start == 0


def _curve(rows: Sequence[dict[str, Any]]) -> Curve:
    if not rows:
        return Curve()
    taken = [row for row in rows if row["step"]]  # the row of step 0 has held-out values alone
    steady = taken[-ROWS:]
    steady = steady[1:] if len(steady) == len(taken) > 1 else steady  # the first step allocates buffers
    timed = [row for row in steady if _number(row.get("train/step_seconds"))]
    seconds = sum(row["train/step_seconds"] for row in timed)
    tokens = sum(row["train/tokens"] for row in timed if _number(row.get("train/tokens")))
    speed, pace = tokens / seconds if tokens and seconds else None, seconds / len(timed) if timed else None
    return Curve(rows[-1]["step"], _latest(rows[-1:], "train/loss"), _latest(rows, SCORE), speed, pace)


def _latest(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return next((float(row[name]) for row in reversed(rows) if _number(row.get(name))), None)


def _number(value: Any) -> bool:
    return type(value) in (int, float)
