"""Rewards by functions of the user's: their samples, their faults, and the processes that they run in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlexp.base.errors import RewardError
from rlexp.config.checks.rewards import check_reward
from rlexp.config.schema import Config
from rlexp.config.schema.losses import PPOConfig
from rlexp.config.schema.rollouts import PythonRewardConfig
from rlexp.training.rollout.rewards import python
from rlexp.training.rollout.rewards.weighted import build_reward
from tests.helpers.paths import ROOT
from tests.helpers.rewards import built, children, function, sample, samples, scored
from tests.helpers.runs import gone
from tests.helpers.slurm.machine import wait_until


def test_a_function_judges_every_sample_in_its_place() -> None:
    drawn = [sample("x" * n, "p" * (n % 3), number=n) for n in range(7)]
    with built(function("by_length", workers=3)) as rewards:
        assert scored(rewards, drawn) == [n + 0.25 * (n % 3) for n in range(7)]
        assert scored(rewards, []) == []
        two, three = samples("ab", "c"), samples("", "é" * 100_000)
        rewards.submit(two)  # one micro-batch is judged while the next is drawn
        three = [replace(each, place=each.place + 2) for each in three]
        rewards.submit(three)
        judged = rewards.judged(two + three, {})
        assert [each.score for each in judged] == [2.75, 1.75, 0.75, 100_000.75]
        assert [each.terms for each in judged] == [{"python": each.score} for each in judged]


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


def test_workers_judge_at_the_same_time(tmp_path: Path) -> None:
    with built(function("meets_another", workers=2)) as rewards:
        assert len(set(scored(rewards, samples(str(tmp_path), str(tmp_path))))) == 2


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
        with pytest.raises(RewardError) as error:
            scored(rewards, samples("good", "bad", "good"))
        assert str(error.value).startswith(f"reward.function=tests.helpers.reward_functions:{name}: ")
        assert re.search(said, str(error.value)), str(error.value)
        assert "worker.py" not in str(error.value)


def test_a_function_that_hangs_is_killed_in_its_time_and_the_next_call_has_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the slow answer the time is up as soon as its call is sent; the others have a minute."""
    own = python.Worker._ask

    def ask(worker: python.Worker, request: dict[str, Any], seconds: float) -> Any:
        return own(worker, request, 0.0 if "slow" in request.get("answers", ()) else seconds + 60)

    monkeypatch.setattr(python.Worker, "_ask", ask)
    with built(function("hangs", timeout=0.5, workers=2)) as rewards:
        with pytest.raises(RewardError, match=r"reward.timeout_seconds=0.5: .*hangs has not returned.*rows.jsonl:2"):
            scored(rewards, samples("good", "slow"))
        assert rewards.judged([], {}) == []  # nothing of the failed call is left
        assert scored(rewards, samples("good", "fine", "well")) == [1.0, 1.0, 1.0]


def test_what_was_not_collected_ends_with_the_reward() -> None:
    """The calls would take longer than a test may."""
    with built(function("hangs", timeout=5000.0)) as rewards:
        rewards.submit(samples("slow"))
        rewards.submit(samples("slow"))


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
from rlexp.config.schema.rollouts import PythonRewardConfig
from rlexp.training.rollout.rewards.weighted import build_reward
from rlexp.training.types import Example, Sample
none = np.zeros(0)
drawn = Sample(place=0, example=Example(0, none, origin="here"), number=0, answer=none, stopped=True,
               text=sys.argv[1], behaviour=none)
rewards = build_reward(PythonRewardConfig(function="tests.helpers.reward_functions:hangs_and_holds_the_interpreter"))
rewards.submit([drawn])
print("submitted", flush=True)
rewards.judged([drawn], {})
"""


def test_a_process_in_a_call_goes_when_its_rank_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(told)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "submitted\n"
        assert wait_until(lambda: told.exists() and bool(told.read_text("utf-8")), 240)
        worker = int(told.read_text("utf-8"))
        os.kill(worker, 0)
        parent.send_signal(signal.SIGKILL)
    assert gone([worker], within=240), f"{worker} outlived its rank"
