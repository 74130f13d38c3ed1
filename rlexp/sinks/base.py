"""What a sink answers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from rlexp.types import MetricRow


class Sink(Protocol):
    def log(self, row: MetricRow) -> None:
        """One optimizer step; `step` comes first."""

    def close(self, exit_code: int) -> None:
        """0 for a run that ended well; 128 + signal for one that was stopped."""


class Sinks:
    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    def log(self, row: MetricRow) -> None:
        for sink in self.sinks:
            sink.log(row)

    def close(self, exit_code: int) -> None:
        """Every sink is closed, also when closing one before it fails."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close, exit_code)
