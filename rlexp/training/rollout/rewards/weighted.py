"""The terms of a reward, and their weighted sum, the score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.launch import watch
from rlexp.training.rollout.rewards.base import Reward, named
from rlexp.training.types import Sample


@dataclass(frozen=True)
class ModelTerm:
    """A term from a reward model. The scoring pass computes it over the ring and passes it to `Rewards.judged`."""

    name: str
    key: str  # key of its configuration: `reward` or `reward.terms.NAME`
    cfg: ModelRewardConfig


@dataclass(frozen=True)
class Judged:
    score: float
    terms: Mapping[str, float]


class Rewards:
    """All terms of the score, of the samples of one rank."""

    def __init__(self, own: Sequence[Reward], models: Sequence[ModelTerm], weights: dict[str, float]) -> None:
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
