"""Rewards: each rule, the user's functions and their faults, sums, and reward models over the ring."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlexp.base.errors import ConfigError, ModelError, RewardError
from rlexp.config.checks.rewards import check_reward
from rlexp.config.identity import changes, identity
from rlexp.config.load import compose_config
from rlexp.config.schema import (
    Config,
    ModelRewardConfig,
    Precision,
    PythonRewardConfig,
    RewardConfig,
    RuleName,
    RuleRewardConfig,
    SumRewardConfig,
)
from rlexp.config.schema.losses import DPOConfig, PPOConfig
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.launch.joining import RankSpec
from rlexp.training.dataset.packing import pack_sequences
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import byte_tokenizer, load_tokenizer
from rlexp.training.model.reward_model import RewardModel, last_places
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.groups import ALONE, Ring, build_world
from rlexp.training.ring.kernels import CpuFlash
from rlexp.training.ring.layouts import get_layout
from rlexp.training.ring.shard import shard_pack
from rlexp.training.rollout.rewards.build import build_reward
from rlexp.training.rollout.rewards.numbers_in_text import last_number, value_of_prompt
from rlexp.training.rollout.rewards.rule import rule_of, share_matched
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.types import Prompt, Sample
from tests.conftest import Shell
from tests.helpers.paths import ROOT
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import descendants

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def sample(text: str, prompt: str = "ask", answer: str | None = None, number: int = 0) -> Sample:
    asked = Prompt(number + 10, ids(prompt), prompt, answer, f"rows.jsonl:{number + 1}")
    return Sample(number, asked, number, ids(text), True, text, np.zeros(len(ids(text))))


def samples(*texts: str) -> list[Sample]:
    return [sample(text, number=number) for number, text in enumerate(texts)]


def scored(rewards: Rewards, drawn: Sequence[Sample]) -> list[float]:
    rewards.submit(drawn)
    rewards.collect()
    rewards.finish(drawn)
    return [each.score for each in drawn]


@contextlib.contextmanager
def built(cfg: RewardConfig) -> Iterator[Rewards]:
    rewards = build_reward(cfg)
    try:
        yield rewards
    finally:
        rewards.close()
    assert not children(), "a reward's process outlived it"


def children() -> list[int]:
    """Return the child processes that run reward functions."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [pid] * (b"rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def function(name: str, timeout: float = 20.0, workers: int = 1) -> PythonRewardConfig:
    return PythonRewardConfig(
        function=f"tests.helpers.reward_functions:{name}", timeout_seconds=timeout, workers=workers
    )  # fmt: skip


# Rules


def by_rule(answered: str, prompt: str = "ask", answer: str | None = None, **keys: object) -> float:
    keys["rule"] = RuleName[str(keys["rule"])]
    with built(RuleRewardConfig(**keys)) as rewards:
        return scored(rewards, [sample(answered, prompt, answer)])[0]


@pytest.mark.parametrize(
    ("expected", "text", "keys"),
    [
        (2 / 3, "a dog and a dog", {"rule": "count", "text": "dog", "most": 3}),
        (1.0, "dogdogdogdog", {"rule": "count", "text": "dog", "most": 3}),
        (0.0, "Dog", {"rule": "count", "text": "dog"}),
        (1.0, "DOG", {"rule": "count", "text": "Dog", "ignore_case": True}),
        (0.0, "", {"rule": "count", "text": "dog"}),
        (1.0, "12345", {"rule": "length", "target": 5}),
        (0.6, "123", {"rule": "length", "target": 5}),
        (0.6, "1234567", {"rule": "length", "target": 5}),
        (0.0, "1" * 11, {"rule": "length", "target": 5}),
        (0.0, "", {"rule": "length", "target": 5}),
        (0.5, "ab12", {"rule": "regex", "pattern": "[a-z]+"}),
        (0.5, "AB12", {"rule": "regex", "pattern": "[a-z]+", "ignore_case": True}),
        (0.0, "", {"rule": "regex", "pattern": ".*"}),
    ],
)
def test_rules_of_the_text_alone(expected: float, text: str, keys: dict[str, object]) -> None:
    assert by_rule(text, **keys) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("expected", "text", "answer", "keys"),
    [
        (1.0, " yes\n", "yes", {}),
        (0.0, "yes.", "yes", {}),
        (0.0, "Yes", "yes", {}),
        (1.0, "Yes", "yes", {"ignore_case": True}),
        (0.0, "", "yes", {}),
    ],
)
def test_an_exact_answer_is_the_rows(expected: float, text: str, answer: str, keys: dict[str, object]) -> None:
    assert by_rule(text, answer=answer, rule="exact", **keys) == expected


@pytest.mark.parametrize(
    ("expected", "text", "prompt", "answer"),
    [
        (1.0, "19", "12 + 7 =", None),
        (1.0, " That is 12 + 7 = 19.0.", "12 + 7 =", None),
        (0.0, "19, or 20", "12 + 7 =", None),
        (0.0, "", "12 + 7 =", None),
        (0.0, "no idea", "12 + 7 =", None),
        (1.0, "so 1,234 apples", "How many?", "1234"),
        (1.0, "x = 3/4", "How much?", "0.75"),
        (1.0, "minus five: −5", "How much?", "#### -5"),
        (0.0, "5", "How much?", "-5"),
        (1.0, "12-5", "How much?", "5"),
        (0.0, "1/0", "How much?", "0"),
        (0.0, "9" * 10_000, "How much?", "9"),
    ],
)
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


@pytest.mark.parametrize(
    ("rule", "answer", "said"),
    [
        ("exact", None, r"rows.jsonl:1: has no field `answer`, which reward.rule=exact compares"),
        (
            "arithmetic",
            None,
            r"rows.jsonl:1: has no field `answer`, and its prompt has no sum .* reward.rule=arithmetic",
        ),
        ("arithmetic", "many", r"rows.jsonl:1: has no number in its field `answer` \('many'\)"),
    ],
)
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
    assert 0 <= rule_of(cfg, "reward")(text, sample("", "1 + 1", "2").prompt) <= 1


@given(st.text(alphabet="ab1", max_size=50))
def test_the_share_matched_counts_characters(text: str) -> None:
    expected = sum(character in "ab" for character in text) / len(text) if text else 0.0
    assert share_matched(text, re.compile("[ab]+")) == pytest.approx(expected)


# The user's functions


def test_a_function_judges_every_sample_in_its_place() -> None:
    drawn = [sample("x" * n, "p" * (n % 3), number=n) for n in range(7)]
    with built(function("by_length", workers=3)) as rewards:
        assert scored(rewards, drawn) == [n + 0.25 * (n % 3) for n in range(7)]
        assert [each.terms for each in drawn] == [{"python": each.score} for each in drawn]
        assert scored(rewards, []) == []
        two, three = samples("ab", "c"), samples("", "é" * 100_000)
        rewards.submit(two)  # one micro-batch is judged while the next is drawn
        rewards.submit(three)
        rewards.collect()
        rewards.finish(two + three)
        assert [each.score for each in two + three] == [2.75, 1.75, 0.75, 100_000.75]


def test_a_function_is_told_of_the_row() -> None:
    with built(function("by_row")) as rewards:
        drawn = [sample("a", answer="a", number=0), sample("b", answer="a", number=1), sample("", number=2)]
        assert scored(rewards, drawn) == [11.0, 11.0, 12.0]


def test_what_a_function_prints_is_no_score(capfd: pytest.CaptureFixture[str]) -> None:
    with built(function("noisy")) as rewards:
        assert scored(rewards, samples("a", "b")) == [1.0, 1.0]
    printed = capfd.readouterr().out
    assert "x" * 100_000 in printed
    assert "said by another" in printed


def test_workers_judge_at_the_same_time() -> None:
    with built(function("process", workers=2)) as rewards:
        assert len(set(scored(rewards, samples("a", "b")))) == 2


def test_the_processes_of_functions_import_no_torch() -> None:
    with built(function("imported")) as rewards:
        assert scored(rewards, samples("a")) == [0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"for rows.jsonl:2 \(sample 1\): it raised\n(.*\n)*.*in _judge\n(.*\n)*ValueError: cannot"),
        ("raises_for_many", r"rows.jsonl:1 \(sample 0\), rows.jsonl:2 .* none of them alone: it raised\n(.*\n)*.*many"),
        ("exits", r"for rows.jsonl:2 \(sample 1\): its process ended with exit code 3"),
        ("is_killed", r"for rows.jsonl:2 \(sample 1\): its process ended by signal 9"),
        ("leaves", r"for rows.jsonl:1 \(sample 0\): it raised\n(.*\n)*SystemExit: enough"),
        ("not_a_number", r"returned nan for rows.jsonl:2 \(sample 1\)"),
        ("infinite", r"returned inf for rows.jsonl:1 \(sample 0\)"),
        ("too_few", r"returned 2 scores for 3 samples, rows.jsonl:1 \(sample 0\), rows.jsonl:2"),
        ("words", r"returned a list with '1.0', which is not a number, for rows.jsonl:1"),
        ("one_for_all", r"returned float, not a list of numbers, for rows.jsonl:1"),
        ("nothing", r"returned NoneType, not a list"),
    ],
)  # fmt: skip
def test_a_fault_of_a_function_is_told_with_its_sample(name: str, said: str) -> None:
    with built(function(name)) as rewards:
        rewards.submit(samples("good", "bad", "good"))
        with pytest.raises(RewardError) as error:
            rewards.collect()
        assert str(error.value).startswith(f"reward.function=tests.helpers.reward_functions:{name}: ")
        assert re.search(said, str(error.value)), str(error.value)
        assert "worker.py" not in str(error.value)


def test_a_function_that_hangs_is_killed_in_its_time_and_the_next_call_has_a_new_process() -> None:
    with built(function("hangs", timeout=0.5, workers=2)) as rewards:
        began = time.monotonic()
        rewards.submit(samples("good", "slow"))
        with pytest.raises(RewardError, match=r"reward.timeout_seconds=0.5: .*hangs has not returned.*rows.jsonl:2"):
            rewards.collect()
        assert time.monotonic() - began < 10
        rewards.collect()  # nothing of the failed call is left
        assert scored(rewards, samples("good", "fine", "well")) == [1.0, 1.0, 1.0]


def test_what_was_not_collected_ends_with_the_reward() -> None:
    began = time.monotonic()
    with built(function("hangs", timeout=500.0)) as rewards:
        rewards.submit(samples("slow"))
        rewards.submit(samples("slow"))
        time.sleep(0.2)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.no_such_module:f", "No module named 'tests.no_such_module'"),
        ("tests.helpers.reward_functions:no_such_function", "has no attribute 'no_such_function'"),
        ("tests.helpers.reward_functions:a_constant", "is not a function, but int"),
        ("dying_module:f", "while its module was imported, its process ended with exit code 5"),
    ],
)
def test_a_function_that_cannot_be_imported_is_an_error_at_the_start(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_module.py").write_text("import os\nos._exit(5)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError) as error:
        build_reward(PythonRewardConfig(function=name, workers=2))
    assert str(error.value).startswith(f"reward.function={name}: ")
    assert said in str(error.value)
    assert not children()


def test_a_function_is_found_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def judge(prompts, answers, rows):\n    return [2] * len(answers)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    cfg = PythonRewardConfig(function="mine:judge")
    check_reward(Config(loss=PPOConfig(), reward=cfg))
    assert "mine" not in sys.modules
    with built(cfg) as rewards:
        assert scored(rewards, samples("a")) == [2.0]


PARENT = """
import sys
import numpy as np
from rlexp.config.schema import PythonRewardConfig
from rlexp.training.rollout.rewards.build import build_reward
from rlexp.training.types import Prompt, Sample
none = np.zeros(0)
drawn = Sample(0, Prompt(0, none, "", None, "here"), 0, none, True, sys.argv[1], none)
rewards = build_reward(PythonRewardConfig(function="tests.helpers.reward_functions:hangs_and_holds_the_interpreter"))
rewards.submit([drawn])
print("submitted", flush=True)
rewards.collect()
"""


def test_a_process_in_a_call_goes_when_its_rank_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(told)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "submitted\n"
        assert eventually(lambda: told.exists() and told.read_text("utf-8"))
        worker = int(told.read_text("utf-8"))
        time.sleep(0.2)
        os.kill(worker, 0)
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: gone(worker)), f"{worker} outlived its rank"


def eventually(true: Callable[[], object], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# Sums


def test_a_sum_weighs_its_terms_and_keeps_them() -> None:
    terms = {
        "dogs": {"kind": "rule", "weight": 2.0, "rule": "count", "text": "dog", "most": 2},
        "judge": {"kind": "model", "weight": 0.5, "path": "somewhere"},
        "size": {"kind": "python", "weight": -0.25, "function": "tests.helpers.reward_functions:by_length"},
    }
    with built(SumRewardConfig(terms=terms)) as rewards:
        drawn = samples("dog", "dog dog")
        rewards.submit(drawn)
        rewards.collect()
        (judge,) = rewards.models
        assert (judge.name, judge.key, judge.cfg.path) == ("judge", "reward.terms.judge", "somewhere")
        rewards.add("judge", drawn, [3.0, -1.0])
        rewards.finish(drawn)
    assert [each.terms for each in drawn] == [
        {"dogs": 0.5, "judge": 3.0, "size": 3.75},
        {"dogs": 1.0, "judge": -1.0, "size": 7.75},
    ]
    assert [list(each.terms) for each in drawn] == [list(terms)] * 2
    assert [each.score for each in drawn] == [1.0 + 1.5 - 0.9375, 2.0 - 0.5 - 1.9375]


def test_a_reward_model_that_overflows_is_named_with_its_sample() -> None:
    with built(SumRewardConfig(terms={"judge": {"kind": "model", "path": "somewhere"}})) as rewards:
        drawn = samples("a", "b")
        rewards.add("judge", drawn, [1.0, math.inf])
        with pytest.raises(RewardError, match=r"reward judge: is inf for rows.jsonl:2 \(sample 1\)"):
            rewards.finish(drawn)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "reward.terms: has no value"),
        ({"a": 3}, "reward.terms.a=3: must be a group of keys"),
        ({"a": {"rule": "count"}}, "reward.terms.a.kind: is missing. Kinds: rule, python, model."),
        ({"a": {"kind": "sum"}}, "reward.terms.a.kind=sum: no such kind"),
        ({"a": {"kind": "modle"}}, "reward.terms.a.kind=modle: no such kind. Did you mean model?"),
        ({"a": {"kind": "rule", "txt": "x"}}, "reward.terms.a.txt: no such key of a reward of kind rule."),
        ({"a": {"kind": "rule", "txt": "x"}}, "Did you mean text? Keys: kind, weight, rule, text, most, "),
        ({"a": {"kind": "rule", "wieght": 1}}, "Did you mean weight?"),
        ({"a": {"kind": "rule", "weight": "much"}}, "reward.terms.a.weight=much: must be a number."),
        ({"a": {"kind": "rule", "weight": math.nan}}, "reward.terms.a.weight=nan: must be a number."),
        ({"a": {"kind": "rule", "most": "many"}}, "reward.terms.a.most=many: Value 'many'"),
        ({"a": {"kind": "rule", "rule": "sonnet"}}, "reward.terms.a.rule=sonnet: Invalid value 'sonnet'"),
        ({"a": {"kind": "python"}}, "reward.terms.a.function: has no value, and a reward of kind python needs one."),
        ({"a": {"kind": "rule", "rule": "count"}}, "reward.terms.a.text: has no value"),
    ],
)  # fmt: skip
def test_a_wrong_term_is_named_by_its_key(terms: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_reward(Config(loss=PPOConfig(), reward=SumRewardConfig(terms=terms)))
    assert said in str(error.value)


def test_a_curve_depends_on_each_key_of_each_term(tmp_path: Path) -> None:
    def keys(**function: object) -> dict[str, object]:
        given = {"kind": "python", "function": "math:fsum"} | function
        terms = [f"reward.terms.a.{key}={value}" for key, value in given.items()]
        terms += ["reward.terms.b.kind=model", f"reward.terms.b.path={tmp_path}"]
        return identity(compose_config(["loss=ppo", "reward=sum", "launch.device=cpu", *terms]))

    one = keys()
    assert (one["reward.terms.a.kind"], one["reward.terms.a.weight"]) == ("python", 1.0)
    assert not list(changes(one, keys(timeout_seconds=3, workers=2, weight=1)))
    assert list(changes(one, keys(weight=2.0))) == [("reward.terms.a.weight", "1.0", "2.0")]
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert [key for key, _, _ in changes(one, keys())] == ["reward.terms.b.path"]


def test_one_reward_is_a_term_of_its_own_name() -> None:
    (term,) = reward_terms(RuleRewardConfig(text="a"))
    assert (term.name, term.weight, term.key) == ("rule", 1.0, "reward")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (RewardConfig(), "reward: has no value, and loss=ppo learns from one."),
        (RuleRewardConfig(), "reward.text: has no value, and reward.rule=count counts"),
        (RuleRewardConfig(text="a", most=0), "reward.most=0: must be"),
        (RuleRewardConfig(rule=RuleName.length, target=0), "reward.target=0: must be"),
        (RuleRewardConfig(rule=RuleName.regex), "reward.pattern: has no value"),
        (RuleRewardConfig(rule=RuleName.regex, pattern="ab(c"), "pattern=ab(c: is no regular expression (missing )"),
        (PythonRewardConfig(function="a:b", timeout_seconds=0.0), "reward.timeout_seconds=0.0: must be"),
        (PythonRewardConfig(function="a:b", workers=0), "reward.workers=0: must be"),
        (PythonRewardConfig(function="tests.helpers.reward_functions"), "must be a module and a function in it"),
        (PythonRewardConfig(function="tests/x.py:f"), "must be a module and a function in it"),
        (PythonRewardConfig(function="no_such_module:f"), "there is no module no_such_module. Give"),
        (PythonRewardConfig(function="tests.helpers.ranks.deeper:f"), "there is no module tests.helpers.ranks.deeper."),
        (ModelRewardConfig(path="./no/such/folder"), "reward.path=./no/such/folder: no such folder."),
        (ModelRewardConfig(path="hub/name", max_length=1), "reward.max_length=1: must be at least 2"),
    ],
)  # fmt: skip
def test_a_wrong_reward_is_refused_before_a_process_starts(reward: RewardConfig, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_reward(Config(loss=PPOConfig(), reward=reward))
    assert said in str(error.value)
    check_reward(Config(loss=DPOConfig(), reward=reward))  # a loss that draws no samples needs no reward


def test_looking_for_a_function_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_here").mkdir()
    (tmp_path / "package_here" / "__init__.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    (tmp_path / "package_here" / "module.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    check_reward(Config(loss=PPOConfig(), reward=PythonRewardConfig(function="package_here.module:f")))
    check_reward(Config(loss=PPOConfig(), reward=PythonRewardConfig(function="math:fsum")))


# Reward models

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}  # fmt: skip
TEXTS = [("What now?", "Nothing at all."), ("a", ""), ("Tell me of the harbour, please.", "No"), ("b" * 37, "c" * 50)]


def saved(path: Path, labels: int = 1) -> Path:
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=labels)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def reward_model(path: Path, tokenizer: object = TOKENIZER, **keys: object) -> RewardModel:
    return RewardModel(ModelRewardConfig(path=str(path), **keys), "reward", tokenizer, 512)


def scores_over(model: RewardModel, ring: Ring, drawn: Sequence[Sample]) -> list[float]:
    layout = get_layout("zigzag")
    pack = pack_sequences([model.encode(each) for each in drawn], layout.multiple(ring.size))
    shard = shard_pack(pack, ring, layout, CpuFlash(), model.max_length)
    return ring_sum(model(shard, last_places(pack)), ring).tolist()


def ring_scores(spec: RankSpec, path: Path) -> list[list[float]]:
    """Score the samples in one pack, then each in its own pack, then no sample."""
    ring = build_world(spec.world_size).ring
    model = reward_model(path, precision=Precision.fp64)
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    alone = [score for each in drawn for score in scores_over(model, ring, [each])]
    return [scores_over(model, ring, drawn), alone, scores_over(model, ring, [])]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("reward") / "llama")


@pytest.mark.parametrize("ring_size", [1, 2, 4])
def test_a_reward_model_says_over_a_ring_what_transformers_says(llama: Path, ring_size: int) -> None:
    plain = AutoModelForSequenceClassification.from_pretrained(llama, dtype=torch.float64, attn_implementation="sdpa")
    batch = TOKENIZER([prompt + answer for prompt, answer in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad(), precise(torch.float64):
        expected = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    assert expected.std() > 1e-2
    for packed, alone, nothing in on_ranks(ring_size, ring_scores, llama):
        assert packed == pytest.approx(expected.tolist(), rel=0, abs=1e-10)
        assert alone == pytest.approx(expected.tolist(), rel=0, abs=1e-10)
        assert nothing == []


def test_a_reward_model_keeps_its_own_dtype(llama: Path) -> None:
    drawn = [sample(answer, prompt) for prompt, answer in TEXTS]
    exact = scores_over(reward_model(llama, precision=Precision.fp64), ALONE, drawn)
    half = reward_model(llama, precision=Precision.bf16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in half.parameters())
    gap = np.abs(np.array(scores_over(half, ALONE, drawn)) - np.array(exact)).max()
    assert 1e-6 < gap < 0.05, gap  # bf16 has 8 bits; measured 0.004


def test_a_foreign_tokenizer_reads_the_texts(llama: Path) -> None:
    """The policy's tokenizer has one more token, so its ids mean something else and the texts are tokenized again."""
    foreign = byte_tokenizer()
    foreign.add_tokens(["<more>"])
    model = reward_model(llama, foreign, max_length=20)
    prompt, answer = model.encode(sample("yes", "abc"))
    assert TOKENIZER.decode(prompt) == "abc"
    assert TOKENIZER.decode(answer) == "yes<eos>"
    prompt, answer = model.encode(sample("yes", "x" * 30 + "end"))
    assert TOKENIZER.decode(prompt) == "x" * 13 + "end"
    with pytest.raises(RewardError, match=r"rows.jsonl:1 is an answer of 31 of its tokens, and reward.max_length=20"):
        model.encode(sample("y" * 30))
    same = reward_model(llama)
    drawn = sample("yes", "abc")
    assert same.encode(drawn) == (drawn.prompt.tokens, drawn.answer)
    with pytest.raises(ModelError, match=r"reward.max_length=20: .* the policy's tokens, .* data.max_length=512"):
        reward_model(llama, max_length=20)


def test_what_is_no_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reward.path=.*: has 2 labels \(LABEL_0, LABEL_1\)"):
        reward_model(saved(tmp_path / "labels", 2))
    LlamaForCausalLM(LlamaConfig(**LLAMA, num_labels=1)).save_pretrained(tmp_path / "causal")
    with pytest.raises(ModelError, match=r"reward.path=.*causal: has no weights for score.weight"):
        reward_model(tmp_path / "causal")
    with pytest.raises(ModelError, match=r"reward.path=.*nowhere: no reward model can be loaded"):
        reward_model(tmp_path / "nowhere")
    config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
                        vocab_size=300, num_labels=1)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"BertForSequenceClassification has no linear head `score`"):
        reward_model(tmp_path / "bert")


def test_a_reward_model_with_learned_positions(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=len(TOKENIZER), num_labels=1, pad_token_id=2)
    torch.manual_seed(0)
    plain = GPT2ForSequenceClassification(config).double().eval()
    plain.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    model = reward_model(tmp_path, precision=Precision.fp64)
    text = torch.from_numpy(ids("a question and an answer")).long().unsqueeze(0)
    with torch.no_grad(), precise(torch.float64):
        expected = float(plain(input_ids=text).logits)
    assert scores_over(model, ALONE, [sample(" and an answer", "a question")]) == pytest.approx([expected], abs=1e-10)


@pytest.mark.slow
def test_a_reward_model_whose_heads_the_policys_layout_cannot_share_out(rlexp: Shell, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}, num_labels=1
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    said = []
    for number, (ring, layout) in enumerate(((1, "zigzag"), (2, "ulysses"))):
        answer = rlexp(
            "launch.device=cpu", f"parallel=ring{ring}", f"launch.nproc={ring}", f"parallel.layout={layout}",
            "loss=ppo", "data=arithmetic", "engine=torch", "train.precision=fp64", "train.max_steps=1", "logger=none",
            "checkpoint.export=false", "reward=model", f"reward.path={tmp_path / 'judge'}", "reward.precision=fp64",
            f"hydra.run.dir=run{number}",
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        (row,) = (tmp_path / f"run{number}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        said.append(json.loads(row)["train/reward/model"])
    assert said[1] == pytest.approx(said[0], rel=0, abs=1e-12)


def test_a_real_tokenizer_with_a_template_frames_the_texts(llama: Path, shared: Path) -> None:
    from rlexp.config.schema import HFModelConfig

    policy = load_tokenizer(HFModelConfig(path=str(shared / "models" / "smollm2-tokenizer")))
    model = reward_model(llama, policy)
    assert model.texts is not None
    model.texts.tokenizer.chat_template = policy.chat_template
    prompt, answer = model.encode(sample("yes", "abc"))
    assert TOKENIZER.decode(prompt).endswith("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(answer).startswith("yes<|im_end|>")
