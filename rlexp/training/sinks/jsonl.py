"""Sinks that write files of the run's folder: metrics.jsonl, one row per optimizer step, floats in full precision;
rollouts.jsonl, one per rollout; and the last evaluation, in run.json."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

from rlexp.launch import run_folder
from rlexp.run_files import evaluations
from rlexp.run_files.metrics_jsonl import MetricRow, line_of, read_rows, row_in, whole_lines, write_lines
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink


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
        self.lines = self._file.lines

    def log(self, row: MetricRow) -> None:
        self._file.append(line_of(row))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        self._file.close()


class RolloutsSink(Sink):
    """Append a line per rollout. There is no file before the first rollout.

    A resumed run keeps the rollouts that began at or before the step it resumes from, since the checkpoint has their
    samples.
    """

    def __init__(self, path: Path, upto: int) -> None:
        self._path = path
        self._file: LineFile | None = None
        self._last = 0
        rows = [(line, row) for line in whole_lines(path) if (row := row_in(line)) is not None and row["step"] <= upto]
        kept = [line for line, _ in rows]
        if kept or path.exists():
            last = rows[-1][1].get("rollout") if rows else 0
            self._last = last if isinstance(last, int) else 0
            self._file = LineFile(path, kept, keep=False)

    def rollout(self, facts: RolloutFacts) -> None:
        if facts.rollout <= self._last:  # it began before a stop, and is reported again
            return
        if self._file is None:
            self._file = LineFile(self._path, [], keep=False)
        self._last = facts.rollout
        self._file.append(line_of_rollout(facts))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        if self._file is not None:
            self._file.close()


def line_of_rollout(facts: RolloutFacts) -> bytes:
    known = {
        "rollout": facts.rollout,
        "step": facts.step,
        "n_samples": facts.n_samples,
        "prompts": [int(index) for index in facts.prompts],
        "digests": [list(each) for each in facts.digests],
        "spans": {name: [list(span) for span in spans] for name, spans in facts.spans.items()},
    }
    return (json.dumps(known, separators=(",", ":")) + "\n").encode()


class LastEvaluation(Sink):
    """The last evaluation, in run.json: `status` shows it without reading the curve, which may be long."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def log(self, row: MetricRow) -> None:
        if values := evaluations.values_of(row):
            run_folder.note(self.run_dir, evaluated={"step": row["step"], **values})
