"""metrics.jsonl: a line per optimizer step, floats in full precision, on its way to the disk before the next step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlexp.types import MetricRow


class JsonlSink:
    """A disk that is full keeps rows waiting, and costs none: they are written as soon as there is room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting = b""
        self._said = False

    def log(self, row: MetricRow) -> None:
        self._waiting += (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            self._flush()
        except OSError as error:
            if not self._said:
                sys.stderr.write(f"rlexp: {self._path} cannot be written ({error.strerror}); its rows wait.\n")
            self._said = True

    def _flush(self) -> None:
        """All that waits or nothing: no half line for the next one to be appended to."""
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, self._waiting)
            if written < len(self._waiting):
                raise OSError(28, "No space left on device")
        except OSError:
            os.ftruncate(self._file, end)
            raise
        self._waiting, self._said = b"", False

    def close(self, exit_code: int) -> None:  # noqa: ARG002
        try:
            if self._waiting:
                self._flush()
        finally:
            os.close(self._file)


def read_rows(path: Path) -> list[MetricRow]:
    """The rows that are whole; a process that was killed may have left half a line at the end."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rewrite(path: Path, source: Path | None, upto: int) -> int:
    """Give `path` the rows of `source` up to a step, at once or not at all; the last step there is."""
    rows = [row for row in read_rows(source) if row["step"] <= upto] if source else []
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return int(rows[-1]["step"]) if rows else 0
