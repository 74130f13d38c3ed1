"""The terms of a reward, the interface of those that run on the rank that drew the answers, and their weighted sum, the
score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlexp.base.errors import RewardError
from rlexp.config.schema.reward_terms import RewardTerm
from rlexp.launch import watch
from rlexp.training.types import Sample

NAMED = 4  # samples that an error names


class Reward(Protocol):
    """One term of a sample's score. Each sample is judged on its own, so the rank that drew it does not matter.

    `submit` or `collect` raises RewardError for a sample that cannot be judged.
    """

    @property
    def name(self) -> str: ...

    def submit(self, samples: Sequence[Sample]) -> None:
        """Begin to judge new samples. If that takes long, return while it goes on."""

    def collect(self) -> dict[int, float]:
        """Wait until all samples that were submitted are judged, and return their terms by the samples' places."""

    def close(self) -> None: ...


def named(samples: Sequence[Sample]) -> str:
    """Return the names of samples for an error: `rows.jsonl:3 (sample 0), …`."""
    names = [f"{sample.example.origin} (sample {sample.number})" for sample in samples]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@dataclass(frozen=True)
class Judged:
    score: float
    terms: Mapping[str, float]


class Rewards:
    """All terms of the score, of the samples of one rank.

    Those of `models` the scoring pass computes over the ring, and passes to `judged`.
    """

    def __init__(self, own: Sequence[Reward], models: Sequence[RewardTerm], weights: dict[str, float]) -> None:
        self.own = tuple(own)
        self.models = tuple(models)
        self.weights = weights

    def submit(self, samples: Sequence[Sample]) -> None:
        """Begin to judge samples that were drawn; return at once."""
        for reward in self.own:
            reward.submit(samples)

    def judged(self, samples: Sequence[Sample], by_models: Mapping[str, Sequence[float]]) -> list[Judged]:
        """Wait until all samples are judged, and return their scores, with what the reward models say of each.

        Terms are added in the order of the configuration, so the sum rounds the same on every layout. A term that is
        not finite raises RewardError.
        """
        with watch.elsewhere():  # a call has a limit of its own, and there may be many
            by_place = {reward.name: reward.collect() for reward in self.own}
        places = [sample.place for sample in samples]
        by_place |= {name: dict(zip(places, scores, strict=True)) for name, scores in by_models.items()}
        judged = []
        for sample in samples:
            terms = {name: by_place[name][sample.place] for name in self.weights}
            for name, value in terms.items():
                if not math.isfinite(value):
                    raise RewardError(
                        f"reward {name}: is {value} for {named([sample])}. A finite number is needed; a reward model "
                        f"may need precision: fp32."
                    )
            judged.append(Judged(sum(weight * terms[name] for name, weight in self.weights.items()), terms))
        return judged

    def close(self) -> None:
        for reward in self.own:
            reward.close()
