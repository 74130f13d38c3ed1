"""metrics.jsonl: one row per optimizer step, as lines and as columns."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlexp.base import files, plain_json
from rlexp.run_files.curve_distance import Column, Steps

METRICS = "metrics.jsonl"
NUMBERS = {int, float, bool}
MOST = 1 << 32  # bytes of a file
MOST_STEPS = 1 << 62  # what an array of steps can hold
MetricRow = dict[str, float | int]  # one optimizer step's values; `step` comes first


def line_of(row: MetricRow) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def read_rows(path: Path) -> list[MetricRow]:
    """Read the whole rows. A process that was killed may have left half a line at the end."""
    return [row for line in whole_lines(path) if (row := row_in(line)) is not None]


def row_in(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line holds; None if it holds something else."""
    try:
        row = plain_json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and _is_step(row.get("step")) else None


def whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in files.read_regular(path, MOST).splitlines(keepends=True) if line.endswith(b"\n")]


def rewrite(path: Path, source: Path | None, upto: int) -> None:
    """Write to `path` the rows of `source` up to a step."""
    rows = read_rows(source) if source else []
    write_lines(path, [line_of(row) for row in rows if row["step"] <= upto])


def write_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Write all lines or none, and wait until they are on the disk."""
    files.write_bytes(path, b"".join(lines), durable=True)


def read_columns(path: Path, notes: list[str]) -> tuple[Steps, dict[str, Column]]:
    """Read metrics.jsonl as steps and columns. A broken row is left out, and `notes` gets a line that says so."""
    try:
        lines = files.read_regular(path, MOST).splitlines(keepends=True)
    except FileNotFoundError:
        return columns_of([])
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror})")
        return columns_of([])
    if lines and not lines[-1].endswith(b"\n"):
        notes.append(f"{path}: its last line is torn, and left out")
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            notes.append(f"{path}:{number}: is not JSON, and left out")
    whole = [row for row in rows if isinstance(row, dict) and _is_step(row.get("step"))]
    if len(whole) < len(rows):
        notes.append(f"{path}: {len(rows) - len(whole)} rows have no step, and are left out")
    return columns_of(whole)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and abs(value) < MOST_STEPS


def columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Steps, dict[str, Column]]:
    """Turn rows into steps, in order, and one column per metric. Where a step comes twice, the last row counts."""
    latest = {row["step"]: row for row in rows if _is_step(row["step"])}
    steps = np.array(sorted(latest), dtype=np.int64)
    alike: dict[tuple[str, ...], list[int]] = {}  # the places of rows with the same names: most rows have the same
    for place, step in enumerate(steps.tolist()):
        alike.setdefault(tuple(latest[step]), []).append(place)
    columns: dict[str, Column] = {}
    for names, places in alike.items():
        block = _block([latest[step] for step in steps[places].tolist()], len(names))
        for name, values in zip(names, block.T, strict=True):
            if name != "step" and not np.isnan(values).all():
                columns.setdefault(name, np.full(len(steps), np.nan))[places] = values
    return steps, columns


def _block(rows: Sequence[Mapping[str, Any]], width: int) -> Column:
    """Return an array of rows × names, NaN for what is not a number."""
    flat = [*itertools.chain.from_iterable(row.values() for row in rows)]
    if not NUMBERS.issuperset(map(type, flat)):  # a text of digits is no number either
        flat = [value if type(value) in NUMBERS else math.nan for value in flat]
    return np.array(flat, dtype=np.float64).reshape(len(rows), width)
