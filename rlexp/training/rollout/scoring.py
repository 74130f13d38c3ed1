"""The scoring pass over the ring: log-probabilities, the critic's values, and the scores of reward models.

Each ring scores the samples that its own ranks drew: the dealer makes packs of them. Results return to the rank that
holds the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.training.dealer.deal import Dealer
from rlexp.training.reference.models import Reference
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.rollout.experience import off_pack
from rlexp.training.types import Floats, Ids, Pack, Sample, Shard, TokenLogps
from rlexp.training.world.groups import World
from rlexp.training.world.objects import gather_objects

Sequences = list[tuple[Ids, Ids]]  # prompt and answer
Scores = dict[str, list[float]]  # of this rank's samples, by the name of the reward model
Columns = list[dict[str, Floats]]  # of each sample, values of its tokens: `old`, `values` and `reference`


@dataclass(frozen=True)
class RingRewardModel:
    name: str
    encode: Callable[[Sample], tuple[Ids, Ids]]  # the prompt and the answer in the model's own tokens
    score: Callable[[Pack], Tensor]  # (S,): this rank's part; the sum over the ring is the score


@dataclass(frozen=True)
class Scorer:
    world: World
    dealer: Dealer  # of one ring
    pack: Callable[[Sequences], Pack]
    hold: Callable[[Pack], Shard]  # cuts this rank's shard, and puts it on its device
    policy: Callable[[Shard], TokenLogps]
    reference: Reference | None
    reward_models: Sequence[RingRewardModel]
    dtype: np.dtype[Any]  # of the values kept for each token
    together: bool  # a forward pass is a collective call of all ranks, not of one ring

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> tuple[Columns, Scores]:
        """Return what the models say of this rank's samples, and the reward models' scores."""
        columns: Columns = [{} for _ in samples]
        sequences = [(sample.example.prompt, sample.answer) for sample in samples]
        for whole, own in self._packs(sequences, together=self.together):
            for field, arrays in self._computed(whole, [at for at, _ in own]).items():
                places = [place for _, place in own]
                kept = self._keep([samples[place] for place in places], field, arrays)
                for place, values in zip(places, kept, strict=True):
                    columns[place][field] = values
        return columns, self.score_rewards(samples)

    @torch.no_grad()
    def score_rewards(self, samples: Sequence[Sample]) -> Scores:
        """Return the reward models' scores, and compute nothing else."""
        return {model.name: self._scored(model, samples) for model in self.reward_models}

    def _packs(self, local: Sequences, *, together: bool = False) -> Iterator[tuple[Sequences, list[tuple[int, int]]]]:
        """Yield the sequences of each pack, with this rank's own: the place of each in the pack, and among its own.

        All ranks of a ring have as many packs, and those of all rings if they must go together.
        """
        whole, first = self._whole(local)
        units = [[np.concatenate(each)] for each in whole]
        longest = max((len(sequence) for (sequence,) in units), default=0)  # of a reward model with tokens of its own
        packs = self.dealer.with_room_for(longest).deal_all(len(units), units.__getitem__).packs[0]
        most = torch.tensor(len(packs))
        if together and self.world.size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for places in (*packs, *((),) * (int(most) - len(packs))):
            own = [(at, place - first) for at, place in enumerate(places) if 0 <= place - first < len(local)]
            yield [whole[place] for place in places], own

    def _whole(self, local: Sequences) -> tuple[Sequences, int]:
        """Return the sequences of all ranks of the ring as one list, and the place of this rank's first. A rehearsal
        has those of one rank alone."""
        ring = self.world.ring
        parts = gather_objects(local, ring.size, ring.group)
        return [each for part in parts for each in part], sum(map(len, parts[: ring.rank]))

    def _computed(self, sequences: Sequences, own: Sequence[int]) -> dict[str, list[Floats]]:
        """Run the models on a pack, and return columns of the sequences at some places."""
        pack = self.pack(sequences)
        shard = self.hold(pack)
        outputs = self.policy(shard)
        columns = {"old": outputs.logps_n}
        if outputs.values_n is not None:
            columns["values"] = outputs.values_n
        if self.reference is not None:
            columns["reference"] = self.reference.logps(shard)
        whole = {field: off_pack(pack, shard, values_n) for field, values_n in columns.items()}
        return {field: [of_sequences[at] for at in own] for field, of_sequences in whole.items()}

    def _keep(self, samples: Sequence[Sample], field: str, arrays: Sequence[Floats]) -> list[Floats]:
        for sample, values in zip(samples, arrays, strict=True):
            assert len(values) == len(sample.answer), f"{field}: {len(values)} values of {len(sample.answer)} tokens"
        return [values.astype(self.dtype) for values in arrays]

    def _scored(self, model: RingRewardModel, samples: Sequence[Sample]) -> list[float]:
        """Return the scores of this rank's samples. A ring runs its own reward model: no other waits for it."""
        scores = [0.0] * len(samples)
        for whole, own in self._packs([model.encode(sample) for sample in samples]):
            scores_S = ring_sum(model.score(self.pack(whole)), self.world.ring).tolist()
            for at, place in own:
                scores[place] = scores_S[at]
        return scores
