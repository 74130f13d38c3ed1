"""trackio: a database on this machine, or the server that trackio's environment variables name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlexp.config.schema import LoggerConfig
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks.base import Ending, Sink


class TrackioSink(Sink):
    """Log to trackio. It knows a run by its name, so the name is the run's id. Rows that it has are not sent again."""

    def __init__(
        self, logger: LoggerConfig, config: Mapping[str, Any], *, run_id: str, history: Sequence[MetricRow] = ()
    ) -> None:
        import trackio  # here, since the package may be missing

        with _quietly():
            self._run = trackio.init(
                project=logger.project,
                name=run_id,
                group=logger.group,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._next = self._run._next_step  # trackio 0.43 has no public name for the next step
        for row in history:
            self.log(row)

    def log(self, row: MetricRow) -> None:
        step = int(row["step"])
        if step >= self._next:
            self._run.log({name: value for name, value in row.items() if name != "step"}, step=step)

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        with _quietly():
            self._run.finish()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide what trackio prints to standard output."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
