"""The terms of a reward, and the score that their weighted sum is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlexp.config.schema import ModelRewardConfig
from rlexp.errors import RewardError
from rlexp.rollout.rewards.base import Reward, named
from rlexp.types import Sample


@dataclass(frozen=True)
class ModelTerm:
    """A term that a reward model gives. It is scored over the ring, by whoever scores, and handed in by `add`."""

    name: str
    key: str  # where its configuration stands: `reward`, or `reward.terms.NAME`
    cfg: ModelRewardConfig


class Rewards:
    """All terms of the score. In this order, with the samples of one rank:

    rewards.submit(samples)            once they are drawn; returns at once
    rewards.collect()                  the rank's own terms are there
    rewards.add(name, samples, scores) for each of `rewards.models`
    rewards.finish(samples)            every `score` is there
    """

    def __init__(self, own: Sequence[Reward], models: Sequence[ModelTerm], weights: dict[str, float]) -> None:
        self.own = tuple(own)
        self.models = tuple(models)
        self.weights = weights

    def submit(self, samples: Sequence[Sample]) -> None:
        for reward in self.own:
            reward.submit(samples)

    def collect(self) -> None:
        for reward in self.own:
            reward.collect()

    def add(self, name: str, samples: Sequence[Sample], scores: Sequence[float]) -> None:
        for sample, score in zip(samples, scores, strict=True):
            sample.terms[name] = score

    def finish(self, samples: Sequence[Sample]) -> None:
        """Refuses what is not finite. Terms are kept and added up in the order of the configuration, so that the sum
        rounds the same wherever each was judged."""
        for sample in samples:
            sample.terms = {name: sample.terms[name] for name in self.weights}
            for name, value in sample.terms.items():
                if not math.isfinite(value):
                    raise RewardError(
                        f"reward {name}: is {value} for {named([sample])}. A finite number is needed; a reward model "
                        f"may need precision: fp32."
                    )
            sample.score = sum(weight * sample.terms[name] for name, weight in self.weights.items())

    def close(self) -> None:
        for reward in self.own:
            reward.close()
