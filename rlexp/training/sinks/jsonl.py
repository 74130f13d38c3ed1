"""Sinks that append lines to a file: metrics.jsonl, one row per optimizer step, floats in full precision."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlexp.run_files.metrics_jsonl import line_of, read_rows, write_lines
from rlexp.training.sinks.base import Ending, Sink

if TYPE_CHECKING:  # importing it would import torch, which readers do without
    from rlexp.run_files.metrics_jsonl import MetricRow


class LineFile:
    """Append lines to a file, each whole or not at all. A line is handed to the disk before the next step.

    A full disk makes lines wait, and loses none: they are written as soon as there is room. A file that is removed
    while the run goes on is written anew, with the lines that are still in memory: with `keep`, all of them.
    """

    def __init__(self, path: Path, lines: list[bytes], *, keep: bool) -> None:
        self._path, self._keep = path, keep
        self.lines = lines
        self._said = False
        write_lines(path, lines)  # removes half a line that a killed process may have left
        self._file = self._open()
        self._are_written()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, line: bytes) -> None:
        self.lines.append(line)
        try:
            self._flush()
        except OSError as error:
            if not self._said:
                sys.stderr.write(f"rlexp: {self._path} cannot be written ({error.strerror}); its rows wait.\n")
            self._said = True

    def _flush(self) -> None:
        """Write all waiting lines or none, so that no line is appended to half a line."""
        if os.fstat(self._file).st_nlink == 0:
            removed, self._file = self._file, self._open()  # or the removed one is kept: its number is nobody else's
            self._written = 0
            os.close(removed)
        waiting, end = b"".join(self.lines[self._written :]), os.fstat(self._file).st_size
        try:
            if os.write(self._file, waiting) < len(waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, end)
            raise
        self._are_written()
        self._said = False

    def _are_written(self) -> None:
        if not self._keep:
            self.lines.clear()
        self._written = len(self.lines)

    def close(self) -> None:
        try:
            self._flush()
        finally:
            os.close(self._file)


class JsonlSink(Sink):
    """Keep the curve so far in memory and in its file."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, [line_of(row) for row in read_rows(path)], keep=True)

    @property
    def lines(self) -> list[bytes]:
        return self._file.lines

    def log(self, row: MetricRow) -> None:
        self._file.append(line_of(row))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        self._file.close()
