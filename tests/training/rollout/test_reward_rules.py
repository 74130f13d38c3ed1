"""Rewards by rule: what each rule gives, and the sums that prompts hold."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import RuleName, RuleRewardConfig
from rlexp.training.rollout.rewards.rule import last_number, rule_of, share_matched, value_of_prompt
from tests.helpers.rewards import built, sample, scored


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


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ("What is (3+4)*2?", 14),
        ("-(3 + 4) × 2 =", -14),
        ("1,234 × 2 ÷ 4 = ?", 617),
        ("Compute 0.1 + 0.2.", Fraction(3, 10)),
        ("007 + 3", 10),
        ("- 12 + 7 =", 19),  # a bullet
        ("-12 + 7 =", -5),
        ("(what is 12 − 7)", 5),
        ("First 1 + 1. Then 2 * 3 ->", 6),
        ("Compute\n3 + 4", 7),
        ("1)3 + 4", 7),
        ("(2 + 1)(3 + 4)", None),
        ("(a)(3 + 4)", None),
        ("1." + "3" * 5000 + " + 1", None),
        ("2 ** 3 + 4", None),
        ("1 + 3 + 4^2", None),
        ("2(3 + 4)", None),
        ("x - 3 + 4", None),
        ("x + 3 + 4", None),
        ("3 / 0", None),
        ("12", None),
        ("1+" * 20_000 + "1", None),
        ("(" * 300 + "1 + 2" + ")" * 300, None),
    ],
)
def test_sums_in_prompts_are_worked_out_or_left_alone(prompt: str, value: Fraction | int | None) -> None:
    assert value_of_prompt(prompt) == value


@pytest.mark.parametrize(("rule", "answer", "said"), [
    ("exact", None, r"rows.jsonl:1: has no field `answer`, which reward.rule=exact compares"),
    ("arithmetic", None, r"rows.jsonl:1: has no field `answer`, and its prompt has no sum .* reward.rule=arithmetic"),
    ("arithmetic", "many", r"rows.jsonl:1: has no number in its field `answer` \('many'\)"),
])  # fmt: skip
def test_a_row_without_what_the_rule_needs_is_named(rule: str, answer: str | None, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        by_rule("3", "Why?", answer, rule=rule)


@st.composite
def sums(draw: st.DrawFn, depth: int = 3) -> tuple[str, Fraction]:
    """Draw a sum in one of its spellings, and its value as a fraction."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.decimals(0, 9999, places=draw(st.integers(0, 3))))
        text = f"{number:f}"
        return (f"{number:,f}" if draw(st.booleans()) else text), Fraction(text)
    sign, apply = draw(st.sampled_from([("+", Fraction.__add__), ("-", Fraction.__sub__), ("−", Fraction.__sub__),
                                        ("*", Fraction.__mul__), ("×", Fraction.__mul__), ("/", Fraction.__truediv__),
                                        ("÷", Fraction.__truediv__)]))  # fmt: skip
    one, first = draw(sums(depth=depth - 1))
    other, second = draw(sums(depth=depth - 1))
    if sign in "/÷" and second == 0:
        other, second = "7", Fraction(7)
    space = draw(st.sampled_from(["", " "]))
    return f"({one}){space}{sign}{space}({other})", apply(first, second)


@settings(max_examples=100, deadline=None)
@given(sums(), st.sampled_from(["", "What is ", "Q: "]), st.sampled_from(["", " =", "?", " = ?"]))
def test_sums_come_to_what_fractions_say(made: tuple[str, Fraction], before: str, after: str) -> None:
    text, value = made
    if any(sign in text for sign in "+-−*×/÷"):
        assert value_of_prompt(f"{before}{text}{after}") == value


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
