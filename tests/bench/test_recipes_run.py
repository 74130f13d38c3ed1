"""Recipes with a small model: each command composes, a run that was stopped goes on, and the page has what it found."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import recipes_run
from bench.recipes import recipes
from bench.recipes_run import SMALL, cell, commands, known_on, overrides, shown, text
from rlexp.config.load import compose_config
from tests.helpers.pages import commands as commands_of
from tests.helpers.paths import ROOT

FOUND: dict[str, Any] = {
    "steps": 10, "seconds": 130.4, "first": 0.69315, "last": 0.6087, "before": 0.5, "after": 0.625,
    "prompt": "system\nBe kind.\nuser\nHow do I float?\nassistant\n", "start": "Swim.\n\n1. Find | …",
    "trained": "Lie down.",
}  # fmt: skip
HH = "conf/experiment/hh_helpful.jsonl.gz"


def test_every_recipe_has_a_small_run() -> None:
    assert sorted(SMALL) == [each.name for each in recipes()]


@pytest.mark.parametrize("name", SMALL)
def test_its_command_composes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the recipe's loss, engine and ring; and torchrun's ranks are those of the nodes."""
    for file in (Path(HH), recipes_run.SUMS, recipes_run.LONG):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = SMALL[name]
    if small.nodes > 1:
        around = {"WORLD_SIZE": small.nodes * small.ranks, "LOCAL_WORLD_SIZE": small.ranks, "RANK": 0}
        for variable, value in (around | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
            monkeypatch.setenv(variable, str(value))
    cfg = compose_config(overrides(name))
    assert cfg.loss.name == {"sft_8b": "sft", "reward_8b": "reward", "grpo_8b": "grpo"}.get(name, "dpo")
    assert cfg.adapter.name == ("lora" if name.startswith("lora") else "none")
    assert cfg.parallel.world_size == small.nodes * small.ranks
    assert cfg.eval.before_training


# ---- results that are kept ----


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text("## Run\n\n<!-- run: begin -->\nNot run yet.\n<!-- run: end -->\n", encoding="utf-8")
    return file


def run(page: Path, *only: str, again: bool = False) -> int:
    return recipes_run.run(argparse.Namespace(only=only or None, again=again, write=page))


def test_a_run_that_was_stopped_goes_on(
    monkeypatch: pytest.MonkeyPatch, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def one(name: str) -> dict[str, Any]:
        ran.append(name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return FOUND

    monkeypatch.setattr(recipes_run, "run_one", one)
    with pytest.raises(KeyboardInterrupt):
        run(page)
    assert re.findall(r"^\| `(\w+)` \| [\d ×]+ \| 10 \|", page.read_text("utf-8"), re.MULTILINE) == ran[:2]
    assert run(page) == 0
    assert ran == [*SMALL][:3] + [*SMALL][2:]
    assert "8 of 8 recipes have run\n" in capsys.readouterr().out
    assert run(page, "sft_8b") == 0
    assert "sft_8b: has run already, by this command" in capsys.readouterr().out
    run(page, "sft_8b", again=True)
    assert ran[-1] == "sft_8b"
    assert len(ran) == 10


def test_one_that_fails_leaves_the_others_their_rows(
    monkeypatch: pytest.MonkeyPatch, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(name: str) -> dict[str, Any]:
        if name == "lora_8b":
            raise RuntimeError("exit status 1")
        return FOUND

    monkeypatch.setattr(recipes_run, "run_one", one)
    assert run(page, "dpo_8b", "lora_8b", "sft_8b") == 1
    told = capsys.readouterr()
    assert told.err == "lora_8b: failed: exit status 1\n"
    assert told.out.splitlines()[-1].startswith("2 of 8 recipes have run; not yet: dpo_8b_128k, dpo_8b_2nodes, grpo_8b")
    assert "`lora_8b`" not in page.read_text("utf-8")


def test_a_recipe_with_another_command_runs_again(monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    monkeypatch.setattr(recipes_run, "run_one", lambda _: FOUND)
    run(page, "dpo_8b", "sft_8b")
    before = known_on(page)
    assert list(before) == ["dpo_8b", "sft_8b"]
    monkeypatch.setitem(SMALL, "sft_8b", replace(SMALL["sft_8b"], ranks=4))
    assert known_on(page) == {"dpo_8b": before["dpo_8b"]}


# ---- what the page says ----


def test_the_page_has_a_row_an_answer_and_the_commands(tmp_path: Path) -> None:
    names = ("dpo_8b", "dpo_8b_2nodes", "grpo_8b", "reward_8b")
    found = {name: shown(name, FOUND | {"run": "2026-11-28, commit 0"}) for name in names}
    said = text(found)
    assert (
        "| `dpo_8b` | 2 | 10 | 130 | loss | 0.693 | 0.609 | accuracy | 0.500 | 0.625 | 2026-11-28, commit 0 |" in said
    )
    assert "| `dpo_8b_2nodes` | 2 × 1 | 10 |" in said
    assert "| `grpo_8b` | 2 | 10 | 130 | reward | 0.693 | 0.609 | reward | 0.500 |" in said
    assert "| `dpo_8b` | How do I float? | Swim. 1. Find \\| … | Lie down. |" in said
    assert said.count("`reward_8b`") == 1  # which gives no answers
    (tmp_path / "page.md").write_text(f"<!-- run: begin -->\n{said}\n<!-- run: end -->", encoding="utf-8")
    assert [shlex.split(each) for each in commands_of(tmp_path / "page.md")] == [
        words for name in found for words in commands(name)
    ]
    assert known_on(tmp_path / "page.md") == found
    assert max(map(len, said.partition("```bash")[2].splitlines())) <= 120


def test_a_cell_is_one_line() -> None:
    assert cell("a\n\n| <b> `c`") == "a \\| &lt;b> \\`c\\`"
    assert cell("word " * 100) == "word " * 40 + "…"


# ---- a real one ----


def test_a_recipe_runs_to_its_end_with_a_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It trains, is evaluated before and after, and answers; the weights are deleted, the curve is kept."""
    words = ("data.path=" + str(ROOT / HH), recipes_run.HELD, "data.eval_size=4", "data.max_length=640",
             "data.max_samples=24", "train.batch_size=8", "train.max_steps=2")  # fmt: skip
    monkeypatch.setattr(recipes_run, "MODEL", ("model=tiny",))
    monkeypatch.setattr(recipes_run, "PLACE", tmp_path)
    monkeypatch.setattr(recipes_run, "TOKENS", 4)
    monkeypatch.setattr(recipes_run, "SMALL", {"dpo_8b": recipes_run.Small(words)})
    found: dict[str, Any] = recipes_run.run_one("dpo_8b")
    assert found["steps"] == 2
    assert (found["first"], found["before"]) == (pytest.approx(0.6931, abs=1e-3), 0.5)
    assert found["start"]
    assert found["trained"]
    left = {each.name for each in (tmp_path / "dpo_8b").iterdir()}
    assert {"metrics.jsonl", "answers.jsonl"} <= left
    assert not {"checkpoints", "model"} & left


def test_a_command_that_fails_shows_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes_run, "PLACE", tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1\n.*loss=nothing"):
        recipes_run.typed([*recipes_run.python("rlexp"), "loss=nothing"], "log")


def test_sums_are_rows_of_prompts_with_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes_run, "SUMS", tmp_path / "sums.jsonl")
    recipes_run.sums()
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 144
    for row in rows:
        one, other = map(int, re.findall(r"\d+", row["question"]))
        assert int(row["answer"]) == one + other
