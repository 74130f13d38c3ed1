"""Rewards by rule: what each rule gives, by hand and by the second reader, and the sums that prompts hold."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import RuleName, RuleRewardConfig
from rlexp.training.rollout.rewards.rule import last_number, rule_of, share_matched, value_of_prompt
from rlexp.verify.recording import TokenExample
from tests.helpers.rewards import built, sample, scored
from tests.oracles import reward_rules as again


def by_rule(answered: str, prompt: str = "ask", answer: str | None = None, **keys: object) -> float:
    keys["rule"] = RuleName[str(keys["rule"])]
    with built(RuleRewardConfig(**keys)) as rewards:
        return scored(rewards, [sample(answered, prompt, answer)])[0]


@pytest.mark.parametrize(("expected", "text", "keys"), [
    (2 / 3, "a dog and a dog", {"rule": "count", "text": "dog", "most": 3}),
    (1.0, "dogdogdogdog", {"rule": "count", "text": "dog", "most": 3}),
    (0.0, "Dog", {"rule": "count", "text": "dog"}),
    (1.0, "DOG", {"rule": "count", "text": "Dog", "ignore_case": True}),
    (0.0, "", {"rule": "count", "text": "dog"}), (1.0, "12345", {"rule": "length", "target": 5}),
    (0.6, "123", {"rule": "length", "target": 5}), (0.6, "1234567", {"rule": "length", "target": 5}),
    (0.0, "1" * 11, {"rule": "length", "target": 5}), (0.0, "", {"rule": "length", "target": 5}),
    (0.5, "ab12", {"rule": "regex", "pattern": "[a-z]+"}),
    (0.5, "AB12", {"rule": "regex", "pattern": "[a-z]+", "ignore_case": True}),
    (0.0, "", {"rule": "regex", "pattern": ".*"}),
])  # fmt: skip
def test_rules_of_the_text_alone(expected: float, text: str, keys: dict[str, object]) -> None:
    assert by_rule(text, **keys) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("expected", "text", "answer", "keys"), [
    (1.0, " yes\n", "yes", {}), (0.0, "yes.", "yes", {}), (0.0, "Yes", "yes", {}),
    (1.0, "Yes", "yes", {"ignore_case": True}), (0.0, "", "yes", {}),
])  # fmt: skip
def test_an_exact_answer_is_the_rows(expected: float, text: str, answer: str, keys: dict[str, object]) -> None:
    assert by_rule(text, answer=answer, rule="exact", **keys) == expected


@pytest.mark.parametrize(("expected", "text", "prompt", "answer"), [
    (1.0, "19", "12 + 7 =", None), (1.0, " That is 12 + 7 = 19.0.", "12 + 7 =", None),
    (0.0, "19, or 20", "12 + 7 =", None), (0.0, "", "12 + 7 =", None), (0.0, "no idea", "12 + 7 =", None),
    (1.0, "so 1,234 apples", "How many?", "1234"), (1.0, "x = 3/4", "How much?", "0.75"),
    (1.0, "minus five: −5", "How much?", "#### -5"), (0.0, "5", "How much?", "-5"), (1.0, "12-5", "How much?", "5"),
    (0.0, "1/0", "How much?", "0"), (0.0, "9" * 10_000, "How much?", "9"),
])  # fmt: skip
def test_the_verifier_holds_the_last_number_to_the_rows(expected, text, prompt, answer) -> None:
    assert by_rule(text, prompt, answer, rule="arithmetic") == expected


@pytest.mark.parametrize(("prompt", "value"), [
    ("What is (3+4)*2?", 14), ("-(3 + 4) × 2 =", -14), ("1,234 × 2 ÷ 4 = ?", 617),
    ("Compute 0.1 + 0.2.", Fraction(3, 10)), ("007 + 3", 10), ("- 12 + 7 =", 19),  # a bullet
    ("-12 + 7 =", -5), ("(what is 12 − 7)", 5), ("First 1 + 1. Then 2 * 3 ->", 6), ("Compute\n3 + 4", 7),
    ("1)3 + 4", 7), ("(2 + 1)(3 + 4)", None), ("(a)(3 + 4)", None), ("1." + "3" * 5000 + " + 1", None),
    ("2 ** 3 + 4", None), ("1 + 3 + 4^2", None), ("2(3 + 4)", None), ("x - 3 + 4", None), ("x + 3 + 4", None),
    ("3 / 0", None), ("12", None), ("1+" * 20_000 + "1", None), ("(" * 300 + "1 + 2" + ")" * 300, None),
    ("1+2 is " + "(" * 20_000, 3), ("9" * 20_000, None), ("3+4" + " " * 997, 7), ("3+4" + " " * 998, None),
])  # fmt: skip
def test_sums_in_prompts_are_worked_out_or_left_alone(prompt: str, value: Fraction | int | None) -> None:
    assert value_of_prompt(prompt) == again.value_of_sum(prompt) == value


@pytest.mark.parametrize(("rule", "answer", "said"), [
    ("exact", None, r"rows.jsonl:1: has no field `answer`, which reward.rule=exact compares"),
    ("arithmetic", None, r"rows.jsonl:1: has no field `answer`, and its prompt has no sum .* reward.rule=arithmetic"),
    ("arithmetic", "many", r"rows.jsonl:1: has no number in its field `answer` \('many'\)"),
])  # fmt: skip
def test_a_row_without_what_the_rule_needs_is_named(rule: str, answer: str | None, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        by_rule("3", "Why?", answer, rule=rule)


@given(st.fractions(max_denominator=10**6), st.sampled_from(["", "so it is ", "3 apples, 7 pears: "]))
def test_the_last_number_is_read_as_it_is_written(value: Fraction, before: str) -> None:
    assert last_number(f"{before}{value}.") == value
    assert last_number(f"{before}{value.numerator:,} of them") == value.numerator


@given(st.text(max_size=200), st.sampled_from(list(RuleName)), st.booleans())
def test_every_rule_is_from_0_to_1(text: str, name: RuleName, ignore_case: bool) -> None:
    cfg = RuleRewardConfig(rule=name, text="a", most=3, target=7, pattern=r"\w*|\d", ignore_case=ignore_case)
    assert 0 <= rule_of(cfg, "reward")(text, sample("", "1 + 1", "2").example) <= 1


@given(st.text(alphabet="ab1", max_size=50))
def test_the_share_matched_counts_characters(text: str) -> None:
    expected = sum(character in "ab" for character in text) / len(text) if text else 0.0
    assert share_matched(text, re.compile("[ab]+")) == pytest.approx(expected)


# ---- the same by the second reader ----

PIECES = ["1", "07", "23", "456", "1,234", "9,", ",500", ".5", "2.25", "0", "3/4", "/0", "1/3", "-", "−", "(", ")", "x",
          " ", " ", " ", "\n", " + ", "+", "*", " × ", "/", "÷", "^", "=", "%", "!", ">", "_", "٣", "²", "é", ". ",
          "$"]  # fmt: skip


def text_with_numbers(chance: random.Random) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 10)))


def test_last_numbers_are_the_second_reader_s() -> None:
    chance, values = random.Random(3), set()
    texts = ["9" * 1000 + "/", "9" * 1001, "-" + "9" * 1000, "1/" + "2" * 998, "1/" + "2" * 999]
    for text in [*texts, *(text_with_numbers(chance) for _ in range(6000))]:
        values.add(value := last_number(text))
        assert again.last_number(text) == value, text
    assert len(values) > 200


def sum_at_the_end(chance: random.Random, depth: int = 2) -> str:
    if depth == 0 or chance.random() < 0.3:
        number = chance.choice(["3", "12", "1,000", "0.5", ".25", "007", "-2", "−4"])
        return number if chance.random() < 0.7 else f"({number})"
    sign = chance.choice(["+", "-", "−", "*", "×", "/", "÷"])
    space = chance.choice(["", " ", "\n"])
    both = f"{sum_at_the_end(chance, depth - 1)}{space}{sign}{space}{sum_at_the_end(chance, depth - 1)}"
    return chance.choice([both, f"({both})", f"-({both})", f"( {both} )"])


def test_sums_are_the_second_reader_s() -> None:
    chance, worked_out = random.Random(4), 0
    around = ["", "", "What is ", "(", ")", "= ", "? ", "- ", "x - ", "2", "^2", " -> 3", "!", "a\n", " =\n", ".", " ("]
    for number in range(6000):
        text = f"{chance.choice(around)}{sum_at_the_end(chance)}{chance.choice(around)}"
        text = text_with_numbers(chance) + chance.choice(around) if number % 3 == 0 else text
        value = value_of_prompt(text)
        assert again.value_of_sum(text) == value, text
        worked_out += value is not None
    assert worked_out > 1000


WORDS = ["dog", "Dog", "DOG", "d", "og", "ß", "SS", "İ", " ", "\n", "1", "12", "", "aa", "a"]
RULES = [
    RuleRewardConfig(rule=RuleName.count, text="dog", most=2),
    RuleRewardConfig(rule=RuleName.count, text="aa", most=3, ignore_case=True),
    RuleRewardConfig(rule=RuleName.count, text="ss", most=1, ignore_case=True),
    RuleRewardConfig(rule=RuleName.length, target=7),
    RuleRewardConfig(rule=RuleName.length, target=1),
    RuleRewardConfig(rule=RuleName.regex, pattern="[a-z]+|(1)?"),
    RuleRewardConfig(rule=RuleName.regex, pattern="^d.*?g$|a*", ignore_case=True),
    RuleRewardConfig(rule=RuleName.exact),
    RuleRewardConfig(rule=RuleName.exact, ignore_case=True),
    RuleRewardConfig(rule=RuleName.arithmetic),
]


@pytest.mark.parametrize("cfg", RULES, ids=lambda cfg: f"{cfg.rule.value} {cfg.text or cfg.pattern or cfg.target}")
def test_rules_are_the_second_reader_s(cfg: RuleRewardConfig) -> None:
    chance, rule, scores = random.Random(5), rule_of(cfg, "reward"), set()
    for _ in range(400):
        text, right = ("".join(chance.choice(WORDS) for _ in range(chance.randrange(5))) for _ in range(2))
        right = chance.choice([right, text.upper(), f" {text}\n"])
        right = f"{right} {chance.choice([1, 12])}" if cfg.rule is RuleName.arithmetic else right
        drawn = sample(text, "3 + 9", chance.choice([right, None]) if cfg.rule is RuleName.arithmetic else right)
        asked = TokenExample(drawn.example.prompt, {}, {}, "", text="3 + 9", right=drawn.example.expected)
        scores.add(score := rule(text, drawn.example))
        assert again.rule_score(cfg, "reward", text, asked) == pytest.approx(score, rel=0, abs=2e-16), (text, right)
    assert len(scores) > 1
