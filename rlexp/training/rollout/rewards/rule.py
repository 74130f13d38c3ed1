"""Built-in rules, each from 0 to 1. An empty answer scores 0, except with `exact` where the row's answer is empty.

One of them reads numbers and sums from texts, as exact fractions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import RuleName, RuleRewardConfig
from rlexp.training.types import Example, Sample

Rule = Callable[[str, Example], float]
MOST_DIGITS = 1000  # longest number that is read; Python itself refuses much longer ones
MOST_OF_SUMS = 1000  # characters that may belong to a sum; in a longer row of them none is looked for

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
# A minus belongs to the number unless it subtracts the number from something before it.
LAST = re.compile(rf"(?P<sign>(?<![\w.)])[-−])?(?P<number>{NUMBER})(?:/(?P<below>[0-9]+))?")
OPERAND = rf"(?:[-−]?\(\s*)*[-−]?(?:{NUMBER})(?:\s*\))*"
SUM = re.compile(rf"{OPERAND}(?:\s*[-−+*/×÷]\s*{OPERAND})+")
OF_SUMS = re.compile(r"[0-9.,()\-−+*/×÷\s]+")
# Text around a sum that makes it part of a larger expression. A hyphen at the start of a line is a bullet.
BEFORE = re.compile(r"(?:[*/^%+×÷(]\s*|\w|[\w)]\s*[-−]\s*)\Z")
AFTER = re.compile(r"\s*[*/^%+×÷!]|\w|\(|\s*[-−](?!>)")


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


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text: an integer, decimal or fraction, with or without commas between thousands."""
    match = _last(LAST, text)
    if match is None or len(match[0]) > MOST_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", ""))
    if match["below"]:
        below = int(match["below"])
        if below == 0:
            return None
        value /= below
    return -value if match["sign"] else value


def value_of_prompt(text: str) -> Fraction | None:
    """Return the value of a text's last sum (or product, …); None if there is none or it cannot be computed."""
    rows = [each.span() for each in OF_SUMS.finditer(text) if len(each[0]) <= MOST_OF_SUMS]
    match = next((last for row in reversed(rows) if (last := _last(SUM, text, *row)) is not None), None)
    if match is None or BEFORE.search(text[: match.start()]) or AFTER.match(text[match.end() :]):
        return None
    if text[: match.start()].endswith(")") and match[0].startswith("("):  # a factor of a product
        return None
    source = _balanced(match[0]).replace(",", "")
    for sign, meant in (("×", "*"), ("÷", "/"), ("−", "-")):
        source = source.replace(sign, meant)
    source = " ".join(re.sub(r"(?<![0-9.])0+(?=[0-9])", "", source).split())
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # ValueError: too many digits
        return None


def _last(pattern: re.Pattern[str], text: str, first: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
    return max(pattern.finditer(text, first, end), key=lambda match: match.start(), default=None)


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.BinOp(left, operator, right):
            one, other = _value(left, source), _value(right, source)
            match operator:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div():
                    return one / other
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, source)
        case ast.Constant(int() | float()):
            return Fraction(str(ast.get_source_segment(source, node)))  # as written: a float would round it
    raise SyntaxError(f"not arithmetic: {ast.dump(node)}")


def _balanced(text: str) -> str:
    """Remove parentheses at both ends that belong to the sentence around the sum."""
    while text.count("(") > text.count(")") and text.startswith("("):
        text = text[1:].lstrip()
    while text.count(")") > text.count("(") and text.endswith(")"):
        text = text[:-1].rstrip()
    return text
