"""Built-in rules, each from 0 to 1. An empty answer scores 0, except with `exact` where the row's answer is empty."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import RuleName, RuleRewardConfig
from rlexp.training.rollout.rewards.numbers_in_text import last_number, value_of_prompt
from rlexp.training.types import Example, Sample

Rule = Callable[[str, Example], float]


class RuleReward:
    """Judges in `submit`: a rule takes less time than a message to another process."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name, self.rule = name, rule
        self._terms: dict[int, float] = {}

    def submit(self, samples: Sequence[Sample]) -> None:
        self._terms |= {sample.place: self.rule(sample.text, sample.example) for sample in samples}

    def collect(self) -> dict[int, float]:
        terms, self._terms = self._terms, {}
        return terms

    def close(self) -> None:
        """Do nothing: a rule holds no resource."""


def rule_of(cfg: RuleRewardConfig, key: str) -> Rule:
    match cfg.rule:
        case RuleName.count:
            return lambda text, _: count(text, cfg.text, cfg.most, ignore_case=cfg.ignore_case)
        case RuleName.length:
            return lambda text, _: length(text, cfg.target)
        case RuleName.regex:
            pattern = re.compile(cfg.pattern, re.IGNORECASE if cfg.ignore_case else 0)
            return lambda text, _: share_matched(text, pattern)
        case RuleName.exact:
            return partial(exact, ignore_case=cfg.ignore_case, key=key)
        case RuleName.arithmetic:
            return partial(arithmetic, key=key)


def count(text: str, wanted: str, most: int, *, ignore_case: bool) -> float:
    """Return how often `wanted` occurs, without overlaps, divided by `most`; at most 1."""
    times = text.casefold().count(wanted.casefold()) if ignore_case else text.count(wanted)
    return min(times, most) / most


def length(text: str, target: int) -> float:
    """Return 1 at `target` characters, falling linearly to 0 at none and at twice as many."""
    return max(0.0, 1 - abs(len(text) - target) / target)


def share_matched(text: str, pattern: re.Pattern[str]) -> float:
    return sum(len(match[0]) for match in pattern.finditer(text)) / len(text) if text else 0.0


def exact(text: str, example: Example, *, ignore_case: bool, key: str) -> float:
    """Return 1 if the answer equals the row's answer, without white space around either, else 0."""
    if example.expected is None:
        raise RewardError(
            f"{example.origin}: has no field `answer`, which {key}.rule=exact compares answers with. Give rows that "
            f"have one, or choose another {key}.rule."
        )
    given, right = text.strip(), example.expected.strip()
    return float(given.casefold() == right.casefold() if ignore_case else given == right)


def arithmetic(text: str, example: Example, *, key: str) -> float:
    """Return 1 if the answer's last number equals that of the row's answer, else 0. Exactly: 1/3 is not 0.333.

    If the row has no answer, the value of its prompt's last sum takes its place.
    """
    if example.expected is None:
        right = value_of_prompt(example.text)
        missing = "has no field `answer`, and its prompt has no sum that can be computed"
    else:
        right = last_number(example.expected)
        missing = f"has no number in its field `answer` ({example.expected!r})"
    if right is None:
        raise RewardError(
            f"{example.origin}: {missing}; {key}.rule=arithmetic needs one of the two. Give rows with the number as "
            f"`answer`, or choose another {key}.rule."
        )
    return float(last_number(text) == right)
