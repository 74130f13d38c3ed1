"""What the models say of samples, over the ring: log-probabilities, values, and the scores of reward models.

Each ring scores what its own ranks drew, in packed micro-batches of `rollout.score_batch_size`; what comes out goes
home to the rank that holds the sample. Which samples make a micro-batch is said in one place, `_chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.ring.collectives import ring_sum
from rlexp.ring.groups import World
from rlexp.ring.objects import gather_objects
from rlexp.rollout.experience import off_pack
from rlexp.types import Floats, Ids, Pack, Sample, Shard, TokenLogps

Sequences = list[tuple[Ids, Ids]]  # prompt and answer


@dataclass(frozen=True)
class Judge:
    """A model that gives whole answers a score: how it reads a sample, and this rank's part of a pack's
    scores."""

    name: str
    encode: Callable[[Sample], tuple[Ids, Ids]]
    score: Callable[[Pack], Tensor]  # (S,): to be summed over the ring


@dataclass(frozen=True)
class Scorer:
    world: World
    size: int  # samples scored at once
    pack: Callable[[Sequences], Pack]
    hold: Callable[[Pack], Shard]  # this rank's part, on its device
    policy: Callable[[Shard], TokenLogps]
    reference: Callable[[Shard], TokenLogps] | None
    judges: Sequence[Judge]
    dtype: np.dtype[Any]  # of what is kept
    together: bool  # a forward pass is a collective call of all ranks, not of a ring

    @torch.no_grad()
    def score(self, mine: Sequence[Sample]) -> dict[str, list[float]]:
        """Fill in `old`, `values` and `reference` of this rank's samples; what the judges say of them, by name."""
        judged: dict[str, list[float]] = {judge.name: [] for judge in self.judges}
        for chunk in self._chunks(mine):
            sequences, first = self._whole([(sample.prompt.tokens, sample.answer) for sample in chunk])
            ours = slice(first, first + len(chunk))
            pack = self.pack(sequences)
            shard = self.hold(pack)
            said = self.policy(shard)
            self._keep(chunk, "old", off_pack(pack, shard, said.logps_t, self.world.ring)[ours])
            if said.values_t is not None:
                trained_t = shard.sequence_t >= 0
                values_t = said.values_t.where(trained_t, torch.zeros_like(said.values_t))
                self._keep(chunk, "values", off_pack(pack, shard, values_t, self.world.ring)[ours])
            if self.reference is not None:
                reference_t = self.reference(shard).logps_t
                self._keep(chunk, "reference", off_pack(pack, shard, reference_t, self.world.ring)[ours])
            for name, scores in self._judged(chunk, ours).items():
                judged[name] += scores
        return judged

    @torch.no_grad()
    def judge(self, mine: Sequence[Sample]) -> dict[str, list[float]]:
        """The judges alone."""
        judged: dict[str, list[float]] = {judge.name: [] for judge in self.judges}
        for chunk in self._chunks(mine) if self.judges else ():
            _, first = self._whole([(sample.prompt.tokens, sample.answer) for sample in chunk])
            for name, scores in self._judged(chunk, slice(first, first + len(chunk))).items():
                judged[name] += scores
        return judged

    def _chunks(self, mine: Sequence[Sample]) -> list[Sequence[Sample]]:
        """This rank's share of each micro-batch of its ring; as many as any ring has where all must go together."""
        share = max(1, self.size // self.world.ring.size)
        most = torch.tensor(-(-len(mine) // share))
        group = None if self.together else self.world.ring.group
        if self.world.size > 1 and (self.together or self.world.ring.size > 1):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return [mine[number * share : (number + 1) * share] for number in range(int(most))]

    def _whole(self, ours: Sequences) -> tuple[Sequences, int]:
        """The shares of all ranks of the ring, and where ours begins."""
        ring = self.world.ring
        parts = gather_objects(ours, ring.size, ring.group)
        return [each for part in parts for each in part], sum(len(part) for part in parts[: ring.rank])

    def _judged(self, chunk: Sequence[Sample], ours: slice) -> dict[str, list[float]]:
        found = {}
        for judge in self.judges:
            sequences, _ = self._whole([judge.encode(sample) for sample in chunk])
            scores_S = ring_sum(judge.score(self.pack(sequences)), self.world.ring)
            found[judge.name] = scores_S[ours].tolist()
        return found

    def _keep(self, chunk: Sequence[Sample], field: str, arrays: Sequence[Floats]) -> None:
        for sample, values in zip(chunk, arrays, strict=True):
            setattr(sample, field, values.astype(self.dtype))
