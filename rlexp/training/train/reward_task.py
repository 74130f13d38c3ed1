"""Train a reward model on pairs: a head scores each answer at its last token, which lies on one rank of the ring.

Shape letters: S sequences (the two answers of a pair stand next to each other), t tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.training.algos.base import Sides, Values
from rlexp.training.dataset.sampler import Batch
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.reward_model import here, last_places
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.train.examples import Examples
from rlexp.training.train.offline_task import HeldExamples, OfflineStep, OfflineTask
from rlexp.training.types import Answered, Pack, moved


class RewardTask(OfflineTask):
    @classmethod
    def unfit(cls, cfg: Config, examples: Examples) -> str | None:  # noqa: ARG003
        return None  # a pair without a margin has one of 0

    def step_of(self, batch: Batch, examples: Sequence[Answered], *, held_out: bool = False) -> OfflineStep:
        return RewardStep(self, batch, examples, held_out=held_out)

    def held(self, examples: Sequence[Answered], pack: Pack) -> HeldAnswers:
        held = super().held(examples, pack)
        return HeldAnswers(**vars(held), last_S=moved(last_places(pack), self.run.device))


@dataclass(frozen=True, kw_only=True)
class HeldAnswers(HeldExamples):
    last_S: Tensor  # the place in the pack at which each answer ends


class RewardStep(OfflineStep):
    def values(self, held: HeldExamples, reference: Sides | None = None) -> tuple[Values, Any]:  # noqa: ARG002
        assert isinstance(held, HeldAnswers)
        task = self.task
        with task.run.phases("forward"):
            tokens: Any = task.run.engine.forward(held.shard)
        here_S, place_S = here(held.shard, held.last_S)
        mine_S = torch.where(here_S, tokens.scores_t[place_S].double(), 0.0)
        return Values(
            logps={},
            reference=None,
            tokens=held.tokens,
            scores=task.by_side(ring_sum(mine_S, task.run.world.ring)),
            margin_E=held.margin_E,
            held_out=self.held_out,
        ), tokens

    def note_tokens(self, meter: Meter, tokens: Any, held: HeldExamples) -> None:
        """There is nothing to say of single tokens."""
