"""Compare the loss with another run's at each step: `parity/loss_abs_diff`, where the other run has the step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

import numpy as np

from rlexp.config.schema.models import Precision
from rlexp.run_files.curve_distance import EARLY, least_size, within_rounding
from rlexp.run_files.metrics_jsonl import METRICS, MetricRow
from rlexp.training.sinks.console import say

PARITY = "parity/loss_abs_diff"
LOSS = "train/loss"

# How far apart two layouts' losses may lie after the first steps, relative to a loss of at least FLOOR. Rounding grows
# as training goes on: over 240 steps of the tiny model, rings 1 and 2 were 2e-13, 2e-5 and 4e-2 apart.
ALLOWED = {Precision.fp64: 1e-9, Precision.fp32: 3e-4, Precision.bf16: 3e-1}
FLOOR = 0.1


def excess(row: MetricRow, precision: Precision) -> float | None:
    """Return the largest difference allowed, if the row's difference is above it.

    In the first steps a comparison allows the same.
    """
    if PARITY not in row:
        return None
    step, size = int(row["step"]), max(abs(row[LOSS]), least_size(LOSS, row))
    if step <= EARLY:
        allowed = size * float(within_rounding(LOSS, precision.value, np.array([step]))[0])
    else:
        allowed = ALLOWED[precision] * max(size, FLOOR)
    return allowed if row[PARITY] > allowed else None


class Baseline:
    """Another run's losses. That run may still go on: its file is read on from the last position.

    A step that the other run has not reached when it is asked for never gets a difference.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._losses: dict[int, float] = {}
        self._file: IO[bytes] | None = None
        self._rest = b""  # the beginning of a line that is not whole yet
        self._asked = self._answered = 0

    def beside(self, row: MetricRow) -> MetricRow:
        step = int(row["step"])
        if LOSS not in row:  # before the first step
            return row
        self._asked += 1
        if step not in self._losses:
            self._read_on()
        if step not in self._losses:
            return row
        self._answered += 1
        return row | {PARITY: abs(row[LOSS] - self._losses[step])}

    def close(self) -> None:
        """Close the file, and tell the user if it had none of the steps."""
        if self._file is not None:
            self._file.close()
        if self._asked and not self._answered:
            say(f"rlexp: logger.baseline: {self._path} had none of these steps; there is no {PARITY}.\n")

    def _read_on(self) -> None:
        try:
            if self._was_replaced():
                self._file, self._rest = self._path.open("rb"), b""
            assert self._file is not None
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        except OSError:  # the file is not there yet, or cannot be read now
            return
        for line in lines:
            try:
                row = json.loads(line)
                self._losses[int(row["step"])] = float(row[LOSS])
            except (ValueError, KeyError, TypeError):  # half a line, left by a killed process
                continue

    def _was_replaced(self) -> bool:
        """Whether the file is another one now. A resumed run writes its file anew under the same name."""
        if self._file is None:
            return True
        at_path, open_ = os.stat(self._path), os.fstat(self._file.fileno())
        if (at_path.st_dev, at_path.st_ino) == (open_.st_dev, open_.st_ino) and at_path.st_size >= self._file.tell():
            return False
        self._file.close()
        return True
