"""The loop around the step: it branches on nothing but cadence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from rlexp.config.schema.cadence import eval_cadence
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks.base import Sinks
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.step import train_step
from rlexp.training.train.task import NOTHING, Task, Watch

AfterStep = Callable[[MetricRow], signal.Signals | None]


@dataclass
class Position:
    """How far a run has come. What it will do next follows from the seed."""

    step: int = 0  # the last one taken
    total_tokens: int = 0


def train_loop(
    task: Task, sinks: Sinks, position: Position | None = None, after_step: AfterStep | None = None,
    watch: Watch = NOTHING,
) -> tuple[MetricRow | None, signal.Signals | None]:  # fmt: skip
    """Train from the step after `position` to the last one, or until `after_step` says to stop.

    `position` is moved along. Return the last row, and the signal that stopped the loop.
    """
    run, position = task.run, position or Position()
    row: MetricRow | None = None
    if run.cfg.eval.before_training and position.step == 0:
        sinks.log({"step": 0, "train/global_step": 0, **task.evaluate(0, watch)})
    for step in range(position.step + 1, last_step(run, position) + 1):
        values = train_step(task, step, watch)
        position.step, position.total_tokens = step, position.total_tokens + int(values["train/tokens"])
        row = {"step": step, **values, "train/total_tokens": position.total_tokens}
        if eval_due(task, step):
            row |= task.evaluate(step, watch)
        if (facts := task.news(step)) is not None:
            sinks.rollout(facts)
        sinks.log(row)
        stop = after_step(row) if after_step else None
        if stop is not None and step < run.total_steps:
            return row, stop
    return row, None


def last_step(run: TrainingRun, position: Position) -> int:
    stop_after = run.cfg.train.stop_after
    return run.total_steps if stop_after is None else min(run.total_steps, position.step + stop_after)


def eval_due(task: Task, step: int) -> bool:
    every = task.run.cfg.train.eval_every
    last = step == task.run.total_steps
    return every is not None and (last or eval_cadence(every).due(step, task.steps_per_epoch))
