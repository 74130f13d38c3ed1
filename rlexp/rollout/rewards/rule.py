"""Built-in rules, each from 0 to 1. An answer without a character scores 0 (`exact`: unless that is what is asked)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from rlexp.config.schema import RuleName, RuleRewardConfig
from rlexp.errors import RewardError
from rlexp.rollout.rewards.arithmetic import last_number, value_of_prompt
from rlexp.types import Prompt, Sample

Rule = Callable[[str, Prompt], float]


class RuleReward:
    """Judges at once: a rule costs less than to hand it to another process."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name = name
        self.rule = rule

    def submit(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.terms[self.name] = self.rule(sample.text, sample.prompt)

    def collect(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


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


def count(text: str, wanted: str, most: int, *, ignore_case: bool = False) -> float:
    """How often `wanted` occurs, without overlaps; `most` times or more is 1."""
    found = text.casefold().count(wanted.casefold()) if ignore_case else text.count(wanted)
    return min(found, most) / most


def length(text: str, target: int) -> float:
    """1 at `target` characters, and less by their distance from it; 0 from twice as many on."""
    return max(0.0, 1 - abs(len(text) - target) / target)


def share_matched(text: str, pattern: re.Pattern[str]) -> float:
    return sum(len(found[0]) for found in pattern.finditer(text)) / len(text) if text else 0.0


def exact(text: str, prompt: Prompt, *, ignore_case: bool = False, key: str = "reward") -> float:
    """Whether the answer is the row's, white space around either left aside."""
    if prompt.answer is None:
        raise RewardError(
            f"{prompt.origin}: has no field `answer`, which {key}.rule=exact holds answers against. Give rows that "
            f"have one, or another {key}.rule."
        )
    given, right = text.strip(), prompt.answer.strip()
    return float(given.casefold() == right.casefold() if ignore_case else given == right)


def arithmetic(text: str, prompt: Prompt, *, key: str = "reward") -> float:
    """Whether the last number of the answer is the row's, or else what the prompt's sum comes to. Exactly: 1/3 is not
    0.333."""
    if prompt.answer is None:
        right = value_of_prompt(prompt.text)
        missing = "has no field `answer`, and no sum in its prompt that can be worked out"
    else:
        right = last_number(prompt.answer)
        missing = f"has no number in its field `answer` ({prompt.answer!r})"
    if right is None:
        raise RewardError(
            f"{prompt.origin}: {missing}; {key}.rule=arithmetic needs one or the other. Give rows with "
            f"the number as `answer`, or another {key}.rule."
        )
    return float(last_number(text) == right)
