"""The loop around the step: it branches on nothing but cadence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from rlexp.sinks.base import Sinks
from rlexp.train.build import Run
from rlexp.train.policy_step import evaluate_policy, policy_step
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
    for step in range(position.step + 1, last_step(run, position) + 1):
        values = take(run, step)
        position.step, position.total_tokens = step, position.total_tokens + int(values["train/tokens"])
        row = {"step": step, **values, "train/total_tokens": position.total_tokens}
        if eval_due(run, step):
            row |= held_out(run, step)
        sinks.log(row)
        stop = after_step(row) if after_step else None
        if stop is not None and step < run.total_steps:
            return row, stop
    return row, None


def take(run: Run, step: int) -> dict[str, float]:
    return train_step(run, run.sampler.batch(step)) if run.rollouts is None else policy_step(run, step)


def held_out(run: Run, step: int) -> dict[str, float]:
    return evaluate(run, step) if run.rollouts is None else evaluate_policy(run, step)


def last_step(run: Run, position: Position) -> int:
    stop_after = run.cfg.train.stop_after
    return run.total_steps if stop_after is None else min(run.total_steps, position.step + stop_after)


def eval_due(run: Run, step: int) -> bool:
    every = run.cfg.train.eval_every
    return every is not None and (step % every == 0 or step == run.total_steps)
