"""Rows as people have them: every shape in every format gives the same tokens, and a bad row is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.errors import DataError
from rlexp.config.load import compose_config
from rlexp.config.schema import HFModelConfig
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset import hub
from rlexp.training.model.loading import byte_tokenizer, load_tokenizer
from rlexp.training.train.examples import Examples, read_examples
from rlexp.training.world.groups import ALONE, World
from tests.helpers.rows import (
    FILES,
    FOLDERS,
    SMALL,
    Rows,
    assistant,
    cache,
    ids,
    read,
    user,
    write_folder,
    write_lines,
    write_parquet,
)

__all__ = ["cache"]  # a fixture of every test here too


# ---- every shape: what a row of one is, and what a reader must make of it ----


def theirs(messages: Rows) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


def as_text(messages: Rows) -> str:
    names = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{names[message['role']]}: {message['content']}" for message in messages)


# Each takes (the conversation before the answer, chosen, rejected), and writes the same pair in its own shape.
PAIR_SHAPES: dict[str, Callable[[Rows, str, str], dict[str, Any]]] = {
    "messages and texts": lambda talk, yes, no: {"prompt": talk, "chosen": yes, "rejected": no},
    "messages": lambda talk, yes, no: {"prompt": talk, "chosen": [assistant(yes)], "rejected": [assistant(no)]},
    "one message": lambda talk, yes, no: {"prompt": talk, "chosen": assistant(yes), "rejected": assistant(no)},
    "whole conversations": lambda talk, yes, no: {
        "chosen": [*talk, assistant(yes)],
        "rejected": [*talk, assistant(no)],
    },
    "conversations with the prompt beside": lambda talk, yes, no: {
        "prompt": talk[0]["content"],
        "chosen": [*talk, assistant(yes)],
        "rejected": [*talk, assistant(no)],
        "score_chosen": 8.0,
        "id": "x",
    },
    "from and value": lambda talk, yes, no: {
        "chosen": theirs([*talk, assistant(yes)]),
        "rejected": theirs([*talk, assistant(no)]),
    },
    "parts of text": lambda talk, yes, no: {
        "prompt": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in talk],
        "chosen": yes,
        "rejected": no,
    },
}
# Only where no part begins with a space or a mark of a turn.
DIALOGUE = {
    "one text": lambda talk, yes, no: {
        "chosen": as_text([*talk, assistant(yes)]),
        "rejected": as_text([*talk, assistant(no)]),
    },
    "a prompt in one text": lambda talk, yes, no: {
        "prompt": as_text(talk) + "\n\nAssistant:",
        "chosen": f" {yes}",
        "rejected": f" {no}",
    },
    "answers with a question behind them": lambda talk, yes, no: {
        "prompt": talk,
        "chosen": [assistant(yes), user("And?")],
        "rejected": [assistant(no), user("Why?")],
    },
}

TALKS = [
    ([user("Hi")], "Yes.", "No!"),
    ([user("Is it?"), assistant("What?"), user("This.")], "It is.", "It is not."),
    ([user("naïve 日本 🙂"), assistant("é"), user("\t…")], "ok\nthen", "ok\nnever"),
]


@pytest.mark.parametrize("shape", {**PAIR_SHAPES, **DIALOGUE})
def test_every_shape_of_pairs_gives_the_same_tokens_in_every_file(shape: str, tmp_path: Path) -> None:
    expected = ids(read(write_lines(tmp_path, [PAIR_SHAPES["messages and texts"](*talk) for talk in TALKS])).train)
    assert len(expected) == 3
    rows = [{**PAIR_SHAPES, **DIALOGUE}[shape](*talk) for talk in TALKS]
    for write in FILES:
        assert ids(read(write(tmp_path, rows)).train) == expected, write.__name__


@pytest.mark.parametrize("write", FOLDERS)
def test_folders_are_read_by_the_datasets_library(write: Any, tmp_path: Path) -> None:
    rows = [PAIR_SHAPES["messages"](*talk) for talk in TALKS]
    expected = ids(read(write_lines(tmp_path, rows)).train)
    place = write(tmp_path, rows)
    first = read(place)
    assert ids(first.train) == expected
    assert first.train[2].origin == f"{place}[train]:3"
    with pytest.raises(DataError, match=r"data\.split=valid: .* has no such split.*train"):
        read(place, "data.split=valid")
    for split, kept in (("train[:2]", expected[:2]), ("train[-1:]", expected[-1:]), ("train[50%:]", expected[2:])):
        assert ids(read(place, f'data.split="{split}"').train) == [(at, *each[1:]) for at, each in enumerate(kept)]


def test_a_folder_s_file_that_changed_with_its_old_time_is_read_anew(tmp_path: Path) -> None:
    rows = [PAIR_SHAPES["messages"](*talk) for talk in TALKS]
    place = Path(write_folder(tmp_path, rows))
    (file,) = place.glob("*.parquet")
    before, stat = ids(read(str(place)).train), file.stat()
    pq.write_table(pa.Table.from_pylist(rows[:2]), file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as `rsync -t` does
    assert ids(read(str(place)).train) == before[:2]


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
talks = st.lists(words, min_size=1, max_size=4).map(
    lambda texts: [
        (user, assistant)[place % 2](text) for place, text in enumerate(texts[: (len(texts) - 1) // 2 * 2 + 1])
    ]
)


@SMALL
@given(
    rows=st.lists(st.tuples(talks, words, words), min_size=1, max_size=6), shape=st.sampled_from(sorted(PAIR_SHAPES))
)
def test_any_pairs_in_any_shape_and_format_are_read_back_the_same(rows: Any, shape: str, tmp_path: Path) -> None:
    plain = [PAIR_SHAPES["messages and texts"](*row) for row in rows]
    if all(row["chosen"] == row["rejected"] for row in plain):
        return
    expected = ids(read(write_lines(tmp_path, plain)).train)
    for write in FILES:
        assert ids(read(write(tmp_path, [PAIR_SHAPES[shape](*row) for row in rows])).train) == expected


@SMALL
@given(rows=st.lists(st.tuples(talks, words, st.booleans()), min_size=1, max_size=6), kind=st.sampled_from([*Kind][1:]))
def test_any_rows_of_other_kinds_are_read_back_the_same(rows: Any, kind: Kind, tmp_path: Path) -> None:
    def row(talk: Rows, text: str, label: bool) -> dict[str, Any]:
        match kind:
            case Kind.unpaired:
                return {"prompt": talk, "completion": text, "label": label}
            case Kind.supervised:
                return {"messages": [*talk, assistant(text)]}
            case _:
                return {"prompt": talk, "answer": text}

    written = [row(*each) for each in rows]
    expected = ids(read(write_lines(tmp_path, written), kind=kind).train)
    assert len(expected) == len(rows)
    for write in FILES[1:]:
        assert ids(read(write(tmp_path, written), kind=kind).train) == expected
    if kind is Kind.unpaired:
        assert [each[4] for each in expected] == [label for _, _, label in rows]


def test_a_pair_has_the_margin_that_its_row_says(tmp_path: Path) -> None:
    pair = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    said: list[tuple[dict[str, Any], float | None]] = [
        ({"margin": 0.1}, 0.1), ({"margin": -2}, -2.0), ({"margin": None}, None), ({}, None),
        ({"score_chosen": 8.5, "score_rejected": 3}, 5.5),
        ({"margin": 0, "score_chosen": 8.5, "score_rejected": 3}, 0.0),
        ({"score_chosen": 8.5}, None), ({"score_chosen": "good", "score_rejected": 3}, None),
        ({"score_chosen": True, "score_rejected": 3}, None), ({"margin": "much better"}, None),
        ({"margin": "2", "score_chosen": 8, "score_rejected": 3}, 5.0),
        ({"margin": True}, None), ({"margin": [1]}, None), ({"margin": 10**400}, None),
    ]  # fmt: skip
    rows = [{**pair, "prompt": f"Hi {number}", **more} for number, (more, _) in enumerate(said)]
    for _ in ("made", "read again"):
        assert [each.margin for each in read(write_lines(tmp_path, rows)).train] == [margin for _, margin in said]
    numbers = [{**pair, "margin": 1.5}, {**pair, "margin": None}, {**pair, "margin": 2.0}]
    for write in (*FILES, *FOLDERS):
        assert [each.margin for each in read(write(tmp_path, numbers)).train] == [1.5, None, 2.0], write.__name__
    (named,) = read(write_lines(tmp_path, [{**pair, "better": 3}]), "data.columns.margin=better").train
    assert named.margin == 3.0


# ---- the real sets ----


@pytest.mark.slow
@pytest.mark.parametrize("model", ["stories260K", "smollm2-tokenizer"])
def test_real_pairs_have_the_same_tokens_in_every_shape_and_format(model: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(HFModelConfig(path=str(shared / "models" / model)))
    path = shared / "data" / "hh_helpful_base" / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:300]
    whole = read(str(path), tokenizer=tokenizer)
    assert len(whole.train) + sum(whole.dropped[reason] for reason in whole.dropped if "kept" not in reason) == 2339
    expected = ids(whole.train[:299])
    for write, shape in zip(FILES + FOLDERS, [*PAIR_SHAPES, "messages"], strict=True):
        written = write(tmp_path, [PAIR_SHAPES[shape](r["prompt"], r["chosen"], r["rejected"]) for r in rows])
        assert ids(read(written, tokenizer=tokenizer).train)[:299] == expected, (write.__name__, shape)
    squality = [json.loads(line) for line in (shared / "data" / "squality" / "pairs.jsonl").open(encoding="utf-8")]
    named = "data.columns.prompt=question"
    one, other = (read(write(tmp_path, squality), named, tokenizer=tokenizer) for write in (write_lines, write_parquet))
    assert ids(one.train) == ids(other.train)
    assert len(one.train) == 299


# ---- the first rows alone ----


def numbered(count: int) -> Rows:
    return [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(count)]


@pytest.mark.parametrize("write", [*FILES, *FOLDERS], ids=lambda write: write.__name__)
def test_the_first_rows_alone_are_read(write: Callable[[Path, Rows], str], tmp_path: Path) -> None:
    """It holds for every format, also where a part of the file ends: Parquet's have 7 rows here."""
    path = write(tmp_path, numbered(20))
    whole = ids(read(path).train)
    for count in (1, 7, 14, 19, 20, 1000):
        assert ids(read(path, f"data.max_samples={count}").train) == whole[:count]


def test_each_source_has_its_first_rows_and_a_streamed_set_is_not_fetched_beyond_them(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = write_lines(tmp_path / "a", numbered(9)), write_folder(tmp_path / "b", numbered(9))
    sources = f"data.sources={{a: {{path: {one}, max_samples: 2}}, b: {{path: {other}}}}}"

    def read_config(*words: str) -> Examples:
        base = ("launch.device=cpu", "logger.progress=false", "data=hf", "data.max_length=200000")
        return read_examples(compose_config([*base, *words]), byte_tokenizer(), World(0, 1, ALONE))

    train = read_config(sources, "data.max_samples=4").train
    assert len(train) == 2 + 4
    held = read_config(f"data.path={one}", f"data.eval_path={other}", "data.max_samples=3")
    assert (len(held.train), len(held.held_out)) == (3, 3)
    streamed = read_config(f"data.path={other}", "data.streaming=true", "data.max_samples=3")
    assert ids(streamed.train) == ids(held.train)
    assert len(hub.table("data", other, None, "train", None, streaming=True, most=3).rows) == 3


def test_columns_are_named_and_a_system_prompt_comes_first(tmp_path: Path) -> None:
    rows = [
        {"q": "Hi", "good": "a", "bad": "b", "system": "Be kind."},
        {"q": "Oh", "good": "c", "bad": "d", "system": None},
    ]
    path = write_lines(tmp_path, rows)
    named = ["data.columns.prompt=q", "data.columns.chosen=good", "data.columns.rejected=bad"]
    pairs = read(path, *named, "data.system=Be brief.").train
    decode = byte_tokenizer().decode
    assert [decode(pair.prompt) for pair in pairs] == [
        "System: Be kind.\n\nUser: Hi\n\nAssistant: ",
        "System: Be brief.\n\nUser: Oh\n\nAssistant: ",
    ]
    assert [decode(pair.answers[0]) for pair in pairs] == ["a<eos>", "c<eos>"]
