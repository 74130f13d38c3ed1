"""Choose what is trained, by the loss."""

from __future__ import annotations

from rlexp.config.schema.losses import (
    LossConfig,
    PolicyLossConfig,
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
    UnpairedConfig,
)
from rlexp.training.train.offline_task import OfflineTask
from rlexp.training.train.reward_task import RewardTask
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.task import Task
from rlexp.training.train.unpaired_task import UnpairedTask

TASKS: dict[type[LossConfig], type[Task]] = {
    PreferenceConfig: OfflineTask,
    UnpairedConfig: UnpairedTask,
    SFTConfig: OfflineTask,
    RewardModelConfig: RewardTask,
    PolicyLossConfig: RolloutTask,
}


def task_class(loss: LossConfig) -> type[Task]:
    """Return the task of the loss's class, or of the nearest class that it inherits from."""
    return next(TASKS[each] for each in type(loss).__mro__ if each in TASKS)
