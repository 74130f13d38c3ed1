"""trackio: a database on this machine, or the server that its own environment variables name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlexp.config.schema import LoggerConfig
from rlexp.sinks.base import Ending, Sink
from rlexp.types import MetricRow


class TrackioSink(Sink):
    """It knows runs by their names, so a run's name is its id. Rows that it has are not given to it again."""

    def __init__(
        self, logger: LoggerConfig, config: Mapping[str, Any], *, run_id: str, history: Sequence[MetricRow] = ()
    ) -> None:
        import trackio  # here, since the package may not be there

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
        self._next = self._run._next_step  # trackio 0.43 has no other word on where a run stands
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
    """It prints its greetings to standard output, which is not its own."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
