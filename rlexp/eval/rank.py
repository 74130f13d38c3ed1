"""A rank of an evaluation: the run's own build without an optimizer, a checkpoint's weights, the task's evaluation."""

from __future__ import annotations

from pathlib import Path

from rlexp.eval.job import EvalJob, Evaluation
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.checkpoint.restore import restore
from rlexp.training.sinks.console import say
from rlexp.training.train.build import build
from rlexp.training.train.resume import saved_task


def evaluate_rank(spec: RankSpec, job: EvalJob, folder: str) -> Evaluation:
    join(spec, job.cfg.launch)
    task = build(job.cfg, trains=False)
    try:
        checkpoint, step = None, 0
        if job.folder is not None:  # its newest whole checkpoint; `folder` has no runs
            restored = restore(str(job.folder.resolve()), Path(folder), task.run.engine, task.run.world, say)
            assert restored is not None, "a folder always has a checkpoint, or raises"
            checkpoint, position = restored
            step = int(position["step"])
            task.restore(checkpoint, saved_task(position), step)
        values = task.evaluate(step)
    finally:
        task.close()
    leave_world()  # a rank that fails does not wait for the others: its error is what the user needs
    return Evaluation(checkpoint, step, values, len(task.examples.held_out), task.kind, task.run.attention)
