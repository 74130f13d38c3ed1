"""The scoring pass over the ring: log-probabilities, the critic's values, and the scores of reward models.

Each ring scores the samples that its own ranks drew, in packed micro-batches of `rollout.score_batch_size`. Results
return to the rank that holds the sample. One place says which samples share a micro-batch: `_chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.training.reference.base import Reference
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.rollout.experience import off_pack
from rlexp.training.types import Floats, Ids, Pack, Sample, Shard, TokenLogps
from rlexp.training.world.groups import World
from rlexp.training.world.objects import gather_objects

Sequences = list[tuple[Ids, Ids]]  # prompt and answer
Scores = dict[str, list[float]]  # of this rank's samples, by the name of the reward model


def share_of(size: int, ring_size: int) -> int:
    """Return a rank's samples in a micro-batch of the ring's."""
    return max(1, size // ring_size)


@dataclass(frozen=True)
class RingRewardModel:
    """A reward model that runs over the ring."""

    name: str
    encode: Callable[[Sample], tuple[Ids, Ids]]  # the prompt and the answer in the model's own tokens
    score: Callable[[Pack], Tensor]  # (S,): this rank's part; the sum over the ring is the score


@dataclass(frozen=True)
class Scorer:
    world: World
    size: int  # samples in a micro-batch
    pack: Callable[[Sequences], Pack]
    hold: Callable[[Pack], Shard]  # cuts this rank's shard, and puts it on its device
    policy: Callable[[Shard], TokenLogps]
    reference: Reference | None
    reward_models: Sequence[RingRewardModel]
    dtype: np.dtype[Any]  # of the values kept for each token
    together: bool  # a forward pass is a collective call of all ranks, not of one ring

    @torch.no_grad()
    def score(self, mine: Sequence[Sample]) -> Scores:
        """Fill in `old`, `values` and `reference` of this rank's samples, and return the reward models' scores."""
        rewards = self._no_rewards()
        for chunk in self._chunks(mine):
            self._fill_in(chunk)
            self._add_rewards(chunk, rewards)
        return rewards

    @torch.no_grad()
    def score_rewards(self, mine: Sequence[Sample]) -> Scores:
        """Return the reward models' scores, and compute nothing else."""
        rewards = self._no_rewards()
        for chunk in self._chunks(mine) if self.reward_models else ():
            self._add_rewards(chunk, rewards)
        return rewards

    def _no_rewards(self) -> Scores:
        return {model.name: [] for model in self.reward_models}

    @property
    def share(self) -> int:
        return share_of(self.size, self.world.ring.size)

    def _chunks(self, mine: Sequence[Sample]) -> Iterable[Sequence[Sample]]:
        """Cut this rank's samples into its shares of the ring's micro-batches.

        All ranks of a ring get the same number of shares, and all ranks of all rings if they must go together.
        """
        share = self.share
        most = torch.tensor(-(-len(mine) // share))
        group = None if self.together else self.world.ring.group
        if self.world.size > 1 and (self.together or self.world.ring.size > 1):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return [mine[number * share : (number + 1) * share] for number in range(int(most))]

    def _whole(self, mine: Sequences) -> tuple[Sequences, slice]:
        """Return the shares of all ranks of the ring as one list, and the place of this rank's share in it."""
        ring = self.world.ring
        parts = gather_objects(mine, ring.size, ring.group)
        first = sum(len(part) for part in parts[: ring.rank])
        return [each for part in parts for each in part], slice(first, first + len(mine))

    def _fill_in(self, chunk: Sequence[Sample]) -> None:
        sequences, own = self._whole([(sample.prompt.tokens, sample.answer) for sample in chunk])
        pack = self.pack(sequences)
        shard = self.hold(pack)
        said = self.policy(shard)
        columns = {"old": said.logps_n}
        if said.values_n is not None:
            columns["values"] = said.values_n
        if self.reference is not None:
            columns["reference"] = self.reference.logps(shard)
        for field, values_n in columns.items():
            self._keep(chunk, field, off_pack(pack, shard, values_n)[own])

    def _add_rewards(self, chunk: Sequence[Sample], rewards: Scores) -> None:
        for model in self.reward_models:
            sequences, own = self._whole([model.encode(sample) for sample in chunk])
            scores_S = ring_sum(model.score(self.pack(sequences)), self.world.ring)
            rewards[model.name] += scores_S[own].tolist()

    def _keep(self, chunk: Sequence[Sample], field: str, arrays: Sequence[Floats]) -> None:
        for sample, values in zip(chunk, arrays, strict=True):
            assert len(values) == len(sample.answer), f"{field}: {len(values)} values of {len(sample.answer)} tokens"
            setattr(sample, field, values.astype(self.dtype))
