"""The loop around the step: it branches on nothing but cadence."""

from __future__ import annotations

from rlexp.sinks.base import MetricRow, Sinks
from rlexp.train.build import Run
from rlexp.train.step import evaluate, train_step


def train_loop(run: Run, sinks: Sinks) -> None:
    total_tokens = 0
    for batch in run.sampler.batches(run.total_steps):
        values = train_step(run, batch)
        total_tokens += int(values["train/tokens"])
        row: MetricRow = {"step": batch.step, **values, "train/total_tokens": total_tokens}
        if eval_due(run, batch.step):
            row |= evaluate(run, batch.step)
        sinks.log(row)


def eval_due(run: Run, step: int) -> bool:
    every = run.cfg.train.eval_every
    return every is not None and (step % every == 0 or step == run.total_steps)
