"""`python -m rlexp.recipe`: lists, shows and copies recipes; a copy trains as the recipe does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlexp.base.pages import addressed
from rlexp.config.load import compose_config, to_plain
from rlexp.config.paths import conf_dir, experiments
from rlexp.recipe.__main__ import main
from tests.helpers.paths import ROOT


def test_all_are_listed_with_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "conf" / "experiment" / "my_own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\n# My own one. It has more to say.\nseed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 82
    names = [line.split()[0] for line in lines[:-2] if not line.startswith(" ")]
    assert names == list(experiments())
    assert re.search(r"^my_own +My own one$", said, re.MULTILINE)
    assert re.search(r"^grpo_8b +GRPO of Qwen3-8B, on the school problems of GSM8K$", said, re.MULTILINE)


def test_one_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora_8b"]) == 0
    assert capsys.readouterr().out == (conf_dir() / "experiment" / "lora_8b.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bug_report", "dpo_8b_2nodes"])
def test_a_copy_is_the_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([name, "--copy", "conf/experiment/mine.yaml"]) == 0
    assert capsys.readouterr().out == (
        "wrote conf/experiment/mine.yaml\ntrain by it: python -m rlexp +experiment=mine\n"
    )
    words = ["launch.device=cpu", "launch.nproc=8", "model=tiny"]
    mine, theirs = (to_plain(compose_config([f"+experiment={each}", *words])) for each in ("mine", name))
    assert mine == theirs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lora8b"], "lora8b: no such recipe. Did you mean lora_8b? Recipes: bug_report, dog, "),
        (["--copy", "a.yaml"], "--copy=a.yaml: copies one recipe. Name it: NAME --copy FILE."),
        (["dog", "--copy", "a"], "--copy=a: a recipe's file ends in .yaml. Say --copy=a.yaml."),
        (["dog", "--copy", "my own.yaml"], "--copy=my own.yaml: +experiment=my own could not name it. Use letters, "),
        (["dog", "--copy", "there.yaml"], "--copy=there.yaml: is there already. Give a new file."),
        (["dog", "--copy", "x/dog.yaml"], "--copy=x/dog.yaml: there is a recipe of this name. Give the copy another"),
        (["dog", "--copy", "there.yaml/a.yaml"], "--copy=there.yaml/a.yaml: cannot be written ("),
        (["dog", "cat"], "unrecognized arguments: cat. See python -m rlexp.recipe --help."),
    ],
)
def test_wrong_words_are_one_message(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("seed: 1\n")
    assert main(words) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"rlexp: {said}")
    assert found.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


def test_a_copy_elsewhere_says_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dog", "--copy", "mine.yaml"]) == 0
    assert "conf/experiment of the folder where you type: put it there" in capsys.readouterr().out


def test_a_page_has_an_address_that_works_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the checkout the short name; elsewhere the file itself. What is no page stays."""
    text = "docs/keys.md lists all keys; docs/no_such_page.md and mydocs/keys.md do not."
    monkeypatch.chdir(ROOT)
    assert addressed(text) == text
    monkeypatch.chdir(tmp_path)
    assert addressed(text) == text.replace("docs/keys.md", f"{ROOT}/docs/keys.md", 1)
