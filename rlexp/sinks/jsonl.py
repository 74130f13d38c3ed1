"""metrics.jsonl: a line per optimizer step, floats in full precision, on its way to the disk before the next step."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlexp.sinks.base import Ending, Sink

if TYPE_CHECKING:  # it would import torch, which who only reads does without
    from rlexp.types import MetricRow


class LineFile:
    """Lines on their way to the disk, whole or not at all.

    A disk that is full keeps lines waiting, and costs none: they are written as soon as there is room. A file that was
    removed under a run is written anew, with the lines that are still here: with `keep` all of them.
    """

    def __init__(self, path: Path, lines: list[bytes], *, keep: bool) -> None:
        self._path, self._keep = path, keep
        self.lines = lines
        self._said = False
        write_lines(path, lines)  # without what a killed process may have left of a line
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
        """All that waits or nothing: no half line for the next one to be appended to."""
        if os.fstat(self._file).st_nlink == 0:
            os.close(self._file)
            self._file, self._written = self._open(), 0
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
    """The curve so far, in memory and in its file."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, [_line(row) for row in read_rows(path)], keep=True)

    @property
    def lines(self) -> list[bytes]:
        return self._file.lines

    def log(self, row: MetricRow) -> None:
        self._file.append(_line(row))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        self._file.close()


def _line(row: MetricRow) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def read_rows(path: Path) -> list[MetricRow]:
    """The rows that are whole; a process that was killed may have left half a line at the end."""
    return [json.loads(line) for line in whole_lines(path)]


def whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def rewrite(path: Path, source: Path | None, upto: int) -> None:
    """Give `path` the rows of `source` up to a step."""
    rows = read_rows(source) if source else []
    write_lines(path, [_line(row) for row in rows if row["step"] <= upto])


def write_lines(path: Path, lines: list[bytes]) -> None:
    """At once or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
