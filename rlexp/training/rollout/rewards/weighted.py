"""The terms of a reward, and their weighted sum, the score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import ModelRewardConfig
from rlexp.launch import watch
from rlexp.training.rollout.rewards.base import Reward, named
from rlexp.training.types import Sample


@dataclass(frozen=True)
class ModelTerm:
    """A term from a reward model. The scoring pass computes it over the ring and passes it to `Rewards.add`."""

    name: str
    key: str  # key of its configuration: `reward` or `reward.terms.NAME`
    cfg: ModelRewardConfig


class Rewards:
    """All terms of the score. Call the methods in this order, with the samples of one rank:

    rewards.submit(samples)            when they are drawn; returns at once
    rewards.collect()                  waits for the rank's own terms
    rewards.add(name, samples, scores) for each of `rewards.models`
    rewards.finish(samples)            sets every `score`
    """

    def __init__(self, own: Sequence[Reward], models: Sequence[ModelTerm], weights: dict[str, float]) -> None:
        self.own = tuple(own)
        self.models = tuple(models)
        self.weights = weights

    def submit(self, samples: Sequence[Sample]) -> None:
        for reward in self.own:
            reward.submit(samples)

    def collect(self) -> None:
        with watch.elsewhere():  # a call has a limit of its own, and there may be many
            for reward in self.own:
                reward.collect()

    def add(self, name: str, samples: Sequence[Sample], scores: Sequence[float]) -> None:
        for sample, score in zip(samples, scores, strict=True):
            sample.terms[name] = score

    def finish(self, samples: Sequence[Sample]) -> None:
        """Set the score of each sample, and raise RewardError if a term is not finite.

        Terms are added in the order of the configuration, so the sum rounds the same on every layout.
        """
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
