"""Rows as people have them: in folders and in several sources, the first ones alone, and with columns of any name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlexp.base.errors import DataError
from rlexp.config.load import compose_config
from rlexp.training.dataset import hub
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import Examples, read_examples
from rlexp.training.world.groups import ALONE, World
from tests.helpers.rows import (
    FILES,
    FOLDERS,
    Rows,
    cache,
    ids,
    read,
    write_folder,
    write_lines,
)

__all__ = ["cache"]  # a fixture of every test here too


def numbered(count: int) -> Rows:
    return [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(count)]


@pytest.mark.parametrize("write", FOLDERS)
def test_folders_are_read_by_the_datasets_library(write: Any, tmp_path: Path) -> None:
    rows = numbered(3)
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
    rows = numbered(3)
    place = Path(write_folder(tmp_path, rows))
    (file,) = place.glob("*.parquet")
    before, stat = ids(read(str(place)).train), file.stat()
    pq.write_table(pa.Table.from_pylist(rows[:2]), file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as `rsync -t` does
    assert ids(read(str(place)).train) == before[:2]


# ---- the first rows alone ----


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
