"""A rank of an evaluation: the run's own build without an optimizer, a checkpoint's weights, the task's evaluation."""

from __future__ import annotations

from pathlib import Path

from rlexp.eval.job import EvalJob, Evaluation
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.checkpoint.restore import restore
from rlexp.training.sinks.console import say
from rlexp.training.train.build import build
from rlexp.training.train.resume import saved_task
from rlexp.training.train.task import Task


def evaluate_rank(spec: RankSpec, job: EvalJob, folder: str) -> Evaluation:
    join(spec, job.cfg.launch)
    task = build(job.cfg, trains=False)
    try:
        checkpoint, step = (None, 0) if job.folder is None else take_up(task, job.folder, Path(folder))
        values = task.evaluate(step)
    finally:
        task.close()
    leave_world()  # a rank that fails does not wait for the others: its error is what the user needs
    return Evaluation(checkpoint, step, values, len(task.examples.held_out), task.kind, task.run.attention)


def take_up(task: Task, folder: Path, nothing: Path) -> tuple[Path, int]:
    """Load the newest whole checkpoint of a folder, and the task's part of it; return it and its step. `nothing` is a
    folder without runs."""
    run = task.run
    restored = restore(str(folder.resolve()), nothing, run.engine, run.world, say)
    assert restored is not None, "a folder always has a checkpoint, or raises"
    path, position = restored
    task.restore(path, saved_task(position), position["step"])
    return path, int(position["step"])
