"""`python -m rlexp.long_pairs`: each answer is right by a second program, and a ring trains on the pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlexp.long_pairs.lengths import ask, wrong
from rlexp.training.model.loading import byte_tokenizer
from tests.helpers import warm
from tests.helpers.paths import ROOT
from tests.helpers.runs import rows_of

TEXTS = f"--texts={ROOT / 'rlexp' / 'config'}"  # short lines
SMALL = ("--tokens=2000", "--pairs=10", TEXTS)


def written(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = warm.run("rlexp.long_pairs", words, folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "long_pairs.jsonl").read_text(encoding="utf-8").splitlines()]


def answered(row: Mapping[str, Any]) -> str:
    """Answer the question by reading the prompt from its end, another way than the product does."""
    text, question = row["prompt"].rsplit("\n\nQuestion: which line follows the line «", 1)
    quoted = question.removesuffix("» in the text above? Answer with that line alone.")
    (after,) = [rest for line, rest in before_and_after(text) if line == quoted]  # it is there once
    return after


def before_and_after(text: str) -> list[tuple[str, str]]:
    lines = [line.strip() for line in text.split("\n")]
    return list(pairwise(lines))


def test_the_chosen_answer_is_right_and_places_are_spread_evenly(tmp_path: Path) -> None:
    rows = written(tmp_path, *SMALL)
    assert len(rows) == 10
    for row in rows:
        lines = [line.strip() for line in row["prompt"].splitlines()]
        assert row["chosen"] == answered(row)
        assert row["rejected"] in lines
        assert row["rejected"] != row["chosen"]
    assert sorted(round(row["place"] * 10 - 0.5) for row in rows) == pytest.approx([*range(10)], abs=1)
    done = warm.run("rlexp.long_pairs", ["--check", "long_pairs.jsonl"], tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("long_pairs.jsonl: 10 pairs, ")


def test_the_seed_fixes_the_file(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        written_to = [*SMALL, "--out", f"{name}.jsonl", "--seed", str(seed)]
        assert warm.run("rlexp.long_pairs", written_to, tmp_path).returncode == 0
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tokens_are_counted_by_the_tokenizer(tmp_path: Path) -> None:
    done = warm.run("rlexp.long_pairs", ["model=tiny", *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(counted with the tokenizer of tiny)" in done.stdout
    tokenizer = byte_tokenizer()
    for line in (tmp_path / "long_pairs.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        longer = max(len(tokenizer(row[name])["input_ids"]) for name in ("chosen", "rejected"))
        assert 1800 < len(tokenizer(row["prompt"])["input_ids"]) + longer <= 2000


def test_by_default_the_texts_are_python_s_own(tmp_path: Path) -> None:
    done = warm.run("rlexp.long_pairs", ["--tokens=2000", "--pairs=2"], tmp_path)
    assert "standard library (licence PSF-2.0)" in done.stdout
    assert "(estimated, 3 characters a token. " in done.stdout


def test_a_ring_of_two_trains_on_them(rlexp: Callable[..., Any], tmp_path: Path) -> None:
    written(tmp_path, "model=tiny", *SMALL)
    answer = rlexp("data=jsonl", "data.path=long_pairs.jsonl", "data.max_length=2000", "parallel=ring2", "logger=none",
                   "launch.device=cpu", "train.batch_size=4", "data.eval_size=2", "train.max_steps=2",
                   "hydra.run.dir=run")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    first, second = rows_of(tmp_path / "run")
    assert first["train/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert second["train/tokens"] > 4 * 2 * 1800
    shown = warm.run("rlexp.data", ["data=jsonl", "data.path=long_pairs.jsonl", "--samples=0"], tmp_path)
    assert "pairs: `prompt`, `chosen`, `rejected`\n    10 rows read, 10 kept" in shown.stdout


# ---- what is refused ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.jsonl").write_text("x", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "one_line.txt").write_text("word " * 4000, encoding="utf-8")
    (tmp_path / "short.txt").write_text("\n".join(f"a line with the number {n}" for n in range(90)), encoding="utf-8")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.bin").write_bytes(b"\xff\xfe")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens=999"], "--tokens=999: must be at least 1000. Give --tokens=1000 or more."),
        (["--pairs=0"], "--pairs=0: must be at least 1."),
        (["--pairs=many"], "argument --pairs: invalid int value: 'many'."),
        (["--out=there.jsonl"], "--out=there.jsonl: exists. Give a new file, or delete this one."),
        (["--out=nowhere/a.jsonl"], "--out=nowhere/a.jsonl: cannot be written (No such file or directory)."),
        (["--texts", "empty"], "--texts=empty: holds no text. Give files of text (UTF-8), or leave --texts out"),
        (["--texts", "nothing"], "--texts=nothing: no such file or folder."),
        (["--texts", "binary"], "--texts=binary: is not a text in UTF-8."),
        (["--texts", "mixed"], "--texts=mixed: holds no text."),
        (["--texts", "short.txt"], "--tokens=128000: the texts have "),
        (["--texts", "one_line.txt", "--tokens=1000"], "--texts=one_line.txt: a part of "),
        (["loss=ipo"], "loss=ipo: only the model decides what a token is. Give model=NAME and its keys alone."),
        (["model=hf", "model.path=./none"], "model.path=./none: no such folder."),
        (["--check", "there.jsonl"], "--check=there.jsonl: cannot be read ("),
        (["--check", "nowhere"], "--check=nowhere: cannot be read (No such file or directory)."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_message(folder: Path, words: Sequence[str], said: str) -> None:
    done = warm.run("rlexp.long_pairs", words, folder)
    assert done.returncode == 1
    assert done.stderr.startswith(f"rlexp: {said}")
    assert done.stderr.count("\n") == 1
    assert not (folder / "long_pairs.jsonl").exists()


def test_files_of_a_folder_that_are_no_text_are_counted(folder: Path) -> None:
    (folder / "mixed" / "docs.md").write_text((ROOT / "docs" / "keys.md").read_text(encoding="utf-8"), encoding="utf-8")
    done = warm.run("rlexp.long_pairs", ["--tokens=2000", "--pairs=2", "--texts", "mixed"], folder)
    assert done.returncode == 0, done.stderr
    assert "mixed: 1 files, " in done.stdout
    assert "; 1 other files are no text\n" in done.stdout


def test_the_file_s_name_leads_to_its_command(rlexp: Callable[..., Any]) -> None:
    answer = rlexp("data=jsonl", "data.path=long_pairs.jsonl", "launch.device=cpu")
    assert answer.stderr.endswith(" `python -m rlexp.long_pairs` makes such a file.\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row | {"chosen": row["rejected"]}, "the chosen answer does not follow the quoted line"),
        (lambda row: row | {"rejected": row["chosen"]}, "the rejected answer must be another line of the text"),
        (lambda row: row | {"rejected": "a line of nowhere"}, "the rejected answer must be another line of the text"),
        (lambda row: row | {"prompt": row["prompt"] + " "}, "its prompt does not end with the question"),
        (lambda row: row | {"prompt": "the number of this line is 7\n" + row["prompt"]}, "has the quoted line 2 times"),
        (lambda row: {"prompt": row["prompt"]}, "must have the texts prompt, chosen and rejected"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_found(change: Callable[[dict[str, Any]], dict[str, Any]], said: str) -> None:
    pair = ask("\n".join(f"the number of this line is {n}" for n in range(15)), 0.49, random.Random(0))
    assert pair is not None
    assert wrong(pair.row()) is None
    assert "«the number of this line is 7»" in pair.prompt
    assert said in str(wrong(change(pair.row())))
