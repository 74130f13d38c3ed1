"""The loop around the step: it branches on nothing but cadence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from rlexp.sinks.base import Sinks
from rlexp.train.build import Run
from rlexp.train.step import evaluate, train_step
from rlexp.types import MetricRow

AfterStep = Callable[[MetricRow], signal.Signals | None]


@dataclass
class Position:
    """Where a run is. What else it will do follows from the seed."""

    step: int = 0  # the last one taken
    total_tokens: int = 0


def train_loop(
    run: Run, sinks: Sinks, position: Position | None = None, after_step: AfterStep | None = None
) -> tuple[MetricRow | None, signal.Signals | None]:
    """From the step after `position`, which is moved along, to the last, or until `after_step` says to stop; the last
    row, and what stopped it."""
    position = position or Position()
    row: MetricRow | None = None
    for batch in run.sampler.batches(position.step + 1, last_step(run, position)):
        values = train_step(run, batch)
        position.step, position.total_tokens = batch.step, position.total_tokens + int(values["train/tokens"])
        row = {"step": batch.step, **values, "train/total_tokens": position.total_tokens}
        if eval_due(run, batch.step):
            row |= evaluate(run, batch.step)
        sinks.log(row)
        stop = after_step(row) if after_step else None
        if stop is not None and batch.step < run.total_steps:
            return row, stop
    return row, None


def last_step(run: Run, position: Position) -> int:
    stop_after = run.cfg.train.stop_after
    return run.total_steps if stop_after is None else min(run.total_steps, position.step + stop_after)


def eval_due(run: Run, step: int) -> bool:
    every = run.cfg.train.eval_every
    return every is not None and (step % every == 0 or step == run.total_steps)
