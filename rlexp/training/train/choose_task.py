"""Choose what is trained, by the loss."""

from __future__ import annotations

from rlexp.config.schema.losses import LossConfig
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.task import Task


def task_class(loss: LossConfig) -> type[Task]:
    return RolloutTask if loss.draws else RowsTask
