"""Run the product's task on samples that a recorded run has drawn: nothing is drawn, scored or rewarded again.

So a part of the run can be tried alone, in another world of ranks or without an engine, on the same train batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.rollouts import RewardConfig
from rlexp.preflight.rehearsal.kernel_cost import CountedKernel
from rlexp.preflight.rehearsal.log import Log
from rlexp.training.reference.models import Reference
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.train.build import build
from rlexp.training.train.parts import Setting
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.surroundings import Unprobed
from rlexp.training.train.task import Task
from rlexp.training.types import CreditedSample, Example
from rlexp.verify.records import Drawn
from rlexp.verify.reference.drawn import Rollout


@dataclass(frozen=True)
class Drawing:
    """What a run has drawn: its rollouts with all that it knows of their samples, and answers to held-out prompts."""

    rollouts: Sequence[Rollout]
    coefficients: Sequence[float]  # of the divergence, by rollout
    held_out: Rollout | None
    steps: int  # that the run has taken
    exact: bool  # whether it computed in float64, its reward models too
    rounding: float  # by which the log-probabilities may differ that tokens were drawn from
    ran: Path | None = None  # the run's weights, from which the reference goes on where it must


class GivenRollouts(Rollouts):
    drawing: Drawing

    @classmethod
    def by(cls, drawing: Drawing, **parts: Any) -> GivenRollouts:
        made = cls(**parts)
        made.drawing = drawing
        return made

    def ensure(self, step: int) -> Made | None:
        """Take this rank's part of the rollout."""
        self.number = self.of_step(step)
        self.kl_coef = self.drawing.coefficients[self.number]
        samples = self.drawing.rollouts[self.number].samples
        self.own_samples = [sample_of(each) for each in samples if each.place % self.world.size == self.world.rank]
        return None


def sample_of(drawn: Drawn) -> CreditedSample:
    assert drawn.advantages is not None
    return CreditedSample(
        place=drawn.place, example=Example(drawn.index, drawn.prompt.astype(np.int32), origin=drawn.origin),
        number=0, answer=drawn.answer.astype(np.int32), stopped=drawn.stopped, text=drawn.text,
        behaviour=drawn.behaviour, score=drawn.score, terms=drawn.terms, old=drawn.old, reference=drawn.reference,
        values=drawn.values, advantages=drawn.advantages, returns=drawn.returns, counts=drawn.counts,
    )  # fmt: skip


@dataclass(frozen=True)
class Again(Unprobed):
    """A run for its first steps; one that draws is given its samples. A log is told where its kernel is called."""

    drawing: Drawing | None
    steps: int
    log: Log | None = None

    def kernel(self, *args: Any) -> BlockKernel:
        kernel = super().kernel(*args)
        return kernel if self.log is None else CountedKernel(kernel, self.log)

    def stored_reference(self, setting: Setting, task: Task, *args: Any, **kwargs: Any) -> Reference:
        assert isinstance(task, RowsTask)
        task.most_steps = self.steps  # what is computed before training is of these steps' rows
        return super().stored_reference(setting, task, *args, **kwargs)

    def rewards(self, cfg: RewardConfig) -> Rewards:
        return super().rewards(cfg) if self.drawing is None else Rewards((), (), {})

    def rollouts(self, **parts: Any) -> Rollouts:
        return super().rollouts(**parts) if self.drawing is None else GivenRollouts.by(self.drawing, **parts)


def task_on(cfg: Config, drawing: Drawing | None, log: Log | None = None, *, steps: int) -> Task:
    """Build the task that a configuration trains."""
    return build(cfg, around=Again(drawing, steps, log))
