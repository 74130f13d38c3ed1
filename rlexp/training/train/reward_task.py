"""Train a reward model on pairs: a head scores each answer at its last token, which lies on one rank of the ring.

Shape letters: S sequences (the two answers of a pair stand next to each other), t tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlexp.config.schema import Config
from rlexp.training.algos.base import Sides, Values
from rlexp.training.dataset.sampler import Batch
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.reward_model import here
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.train.examples import Examples
from rlexp.training.train.offline_task import HeldExamples, OfflineStep, OfflineTask
from rlexp.training.types import Answered, Pack, Shard


class RewardTask(OfflineTask):
    @classmethod
    def unfit(cls, cfg: Config, examples: Examples) -> str | None:
        """Refuse a mixture: its pairs would be trained towards different goals. Without any margin, all are 0."""
        margins = examples.margins
        if margins.lacking in (0, margins.rows) or not cls.loss_of(cfg).wanted.margins:
            return None
        return (
            f"{margins.lack}, and the others have one. Give every row `margin`, or none; or leave them out: "
            f"loss.margin_weight=0."
        )

    def step_of(self, batch: Batch, examples: Sequence[Answered], *, held_out: bool = False) -> OfflineStep:
        return RewardStep(self, batch, examples, held_out=held_out)

    def cut(self, pack: Pack) -> Shard:
        shard = super().cut(pack)
        here_S, place_S = here(shard, pack.end_S)
        ended_n = here_S.nonzero().squeeze(-1)
        return replace(shard, ends_n=place_S[ended_n], ended_n=ended_n)

    def remarks(self) -> list[str]:
        weight = getattr(self.run.cfg.loss, "margin_weight", 0.0)
        if self.examples.margins.lacking or not weight:
            return []
        return [
            f"margins: all rows have one (`margin`, or `score_chosen` less `score_rejected`), and loss.margin_weight="
            f"{weight:g} asks for it; loss.margin_weight=0 leaves them out"
        ]


class RewardStep(OfflineStep):
    def values(self, held: HeldExamples, reference: Sides | None = None) -> tuple[Values, Any]:  # noqa: ARG002
        task, shard = self.task, held.shard
        with task.run.phases("forward"):
            tokens: Any = task.run.engine.forward(shard)
        assert shard.ended_n is not None
        mine_S = torch.zeros(shard.sequences, dtype=torch.float64, device=tokens.scores_n.device)
        mine_S = mine_S.index_copy(0, shard.ended_n, tokens.scores_n.double())
        return Values(
            logps={},
            reference=None,
            tokens=held.tokens,
            scores=task.by_side(ring_sum(mine_S, shard.ring)),
            margin_E=held.margin_E,
            held_out=self.held_out,
        ), tokens

    def note_tokens(self, meter: Meter, tokens: Any, held: HeldExamples) -> None:
        """There is nothing to say of single tokens."""
