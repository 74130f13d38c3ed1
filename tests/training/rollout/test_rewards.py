"""Rewards that are sums of terms, and configurations of rewards that are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlexp.base.errors import ConfigError, RewardError
from rlexp.config.checks.rewards import check_reward
from rlexp.config.identity import changes, identity
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.losses import DPOConfig, PPOConfig
from rlexp.config.schema.reward_terms import reward_terms
from rlexp.config.schema.rollouts import (
    ModelRewardConfig,
    PythonRewardConfig,
    RewardConfig,
    RuleName,
    RuleRewardConfig,
    SumRewardConfig,
)
from tests.helpers.rewards import built, samples


def test_a_sum_weighs_its_terms_and_keeps_them() -> None:
    terms = {
        "dogs": {"kind": "rule", "weight": 2.0, "rule": "count", "text": "dog", "most": 2},
        "judge": {"kind": "model", "weight": 0.5, "path": "somewhere"},
        "size": {"kind": "python", "weight": -0.25, "function": "tests.helpers.reward_functions:by_length"},
    }
    with built(SumRewardConfig(terms=terms)) as rewards:
        drawn = samples("dog", "dog dog")
        rewards.submit(drawn)
        (judge,) = rewards.models
        assert isinstance(judge.cfg, ModelRewardConfig)
        assert (judge.name, judge.key, judge.cfg.path) == ("judge", "reward.terms.judge", "somewhere")
        judged = rewards.judged(drawn, {"judge": [3.0, -1.0]})
    assert [each.terms for each in judged] == [
        {"dogs": 0.5, "judge": 3.0, "size": 3.75},
        {"dogs": 1.0, "judge": -1.0, "size": 7.75},
    ]
    assert [list(each.terms) for each in judged] == [list(terms)] * 2
    assert [each.score for each in judged] == [1.0 + 1.5 - 0.9375, 2.0 - 0.5 - 1.9375]


def test_a_reward_model_that_overflows_is_named_with_its_sample() -> None:
    with built(SumRewardConfig(terms={"judge": {"kind": "model", "path": "somewhere"}})) as rewards:
        drawn = samples("a", "b")
        with pytest.raises(RewardError, match=r"reward judge: is inf for rows.jsonl:2 \(sample 1\)"):
            rewards.judged(drawn, {"judge": [1.0, math.inf]})


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
        ({"a": {"kind": "rule", "most": "many"}}, "reward.terms.a.most=many: must be a whole number."),
        ({"a": {"kind": "rule", "rule": "sonnet"}}, "reward.terms.a.rule=sonnet: must be one of count, length"),
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
