"""The sink that writes rollouts.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from rlexp.run_files.metrics_jsonl import row_in, whole_lines
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink
from rlexp.training.sinks.jsonl import LineFile


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
        self._file.append(line_of(facts))

    def log(self, row: object) -> None:
        pass

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        if self._file is not None:
            self._file.close()


def line_of(facts: RolloutFacts) -> bytes:
    known = {
        "rollout": facts.rollout,
        "step": facts.step,
        "n_samples": facts.n_samples,
        "prompts": [int(index) for index in facts.prompts],
        "digests": [list(each) for each in facts.digests],
        "spans": {name: [list(span) for span in spans] for name, spans in facts.spans.items()},
    }
    return (json.dumps(known, separators=(",", ":")) + "\n").encode()
