"""The terms of a reward, the interface of those that run on the rank that drew the answers, and their weighted sum, the
score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlexp.base.errors import RewardError
from rlexp.config.schema.reward_terms import RewardTerm, reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, PythonRewardConfig, RewardConfig, RuleRewardConfig
from rlexp.launch import watch
from rlexp.training.rollout.rewards.python import PythonReward, named
from rlexp.training.rollout.rewards.rule import RuleReward, rule_of
from rlexp.training.types import Sample


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


def build_reward(cfg: RewardConfig) -> Rewards:
    """Build this rank's rewards. A user's function is imported now, in its processes, so that errors show early."""
    own: list[Reward] = []
    models: list[RewardTerm] = []
    terms = reward_terms(cfg)
    try:
        for term in terms:
            match term.cfg:
                case RuleRewardConfig() as rule:
                    own.append(RuleReward(term.name, rule_of(rule, term.key)))
                case PythonRewardConfig() as function:
                    with watch.elsewhere():  # an import has a limit of its own
                        own.append(PythonReward(term.name, function, term.key))
                case ModelRewardConfig():
                    models.append(term)
                case _:
                    raise AssertionError(term.cfg)
    except BaseException:
        for reward in own:
            reward.close()
        raise
    return Rewards(own, models, {term.name: term.weight for term in terms})
