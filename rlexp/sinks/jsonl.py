"""metrics.jsonl: a line per optimizer step, floats in full precision, flushed as it is written."""

from __future__ import annotations

import json
from pathlib import Path

from rlexp.sinks.base import MetricRow


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: MetricRow) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, exit_code: int) -> None:  # noqa: ARG002
        self._file.close()
