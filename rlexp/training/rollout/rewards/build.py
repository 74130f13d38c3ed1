"""Build the rewards from their configuration."""

from __future__ import annotations

from rlexp.config.schema.reward_terms import RewardTerm, reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, PythonRewardConfig, RewardConfig, RuleRewardConfig
from rlexp.launch import watch
from rlexp.training.rollout.rewards.python import PythonReward
from rlexp.training.rollout.rewards.rule import RuleReward, rule_of
from rlexp.training.rollout.rewards.weighted import Reward, Rewards


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
