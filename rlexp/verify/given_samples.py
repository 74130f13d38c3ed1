"""Run the product's task on samples that a recorded run has drawn: nothing is drawn, scored or rewarded again.

So a part of the run can be tried alone, in another world of ranks or without an engine, on the same train batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.config.schema import Config
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.train.build import Sources, build, build_task, unprobed
from rlexp.training.train.build_rollouts import Parts
from rlexp.training.train.examples import read_examples
from rlexp.training.train.offline_task import OfflineTask
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.task import Task
from rlexp.training.types import Prompt, Sample
from rlexp.training.world.groups import World
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
        self.mine = [sample_of(each) for each in samples if each.place % self.world.size == self.world.rank]
        return None


def sample_of(drawn: Drawn) -> Sample:
    return Sample(
        place=drawn.place, prompt=Prompt(drawn.index, drawn.prompt.astype(np.int32), "", None, drawn.origin),
        number=0, answer=drawn.answer.astype(np.int32), stopped=drawn.stopped, text=drawn.text,
        behaviour=drawn.behaviour, score=drawn.score, terms=drawn.terms, old=drawn.old, reference=drawn.reference,
        values=drawn.values, advantages=drawn.advantages, returns=drawn.returns, counts=drawn.counts,
    )  # fmt: skip


def task_on(cfg: Config, drawing: Drawing | None, sources: Sources | None = None, *, steps: int) -> Task:
    """Build the task that a configuration trains, for its first `steps`; one that draws is given its samples."""
    if drawing is None:

        def of_rows(cfg: Config, tokenizer: Any, world: World, bridge: Bridge | None) -> Task:
            task = build_task(cfg, tokenizer, world, bridge)
            if isinstance(task, OfflineTask):
                task.most_steps = steps  # what is computed before training is of these steps' rows
            return task

        return build(cfg, probing=unprobed, task_of=of_rows, sources=sources)
    parts = Parts(rewards=lambda _: Rewards((), (), {}), rollouts=partial(GivenRollouts.by, drawing))

    def task_of(cfg: Config, tokenizer: Any, world: World, _: Bridge | None) -> Task:
        return RolloutTask.of(cfg, read_examples(cfg, tokenizer, world), parts=parts)

    return build(cfg, probing=unprobed, task_of=task_of, sources=sources)
