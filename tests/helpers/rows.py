"""Rows as people have them: written in every format, and read as a run reads them, or a second time beside it."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.losses import LossConfig
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import Examples, read_examples
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World
from rlexp.verify.recording import TokenExample
from tests.oracles.pairs import ExampleSet, examples_of

Rows = Sequence[dict[str, Any]]
SMALL = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own, on which no time is spent for a machine that loses its power."""
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _file: None)


def as_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_lines(folder: Path, rows: Rows, name: str = "rows") -> str:
    (folder / f"{name}.jsonl").write_bytes(as_lines(rows))
    return str(folder / f"{name}.jsonl")


def write_list(folder: Path, rows: Rows) -> str:
    (folder / "rows.json").write_text(json.dumps(list(rows), ensure_ascii=False, indent=1), encoding="utf-8")
    return str(folder / "rows.json")


def write_gzip(folder: Path, rows: Rows) -> str:
    half = len(rows) // 2
    members = gzip.compress(as_lines(rows[:half])) + gzip.compress(as_lines(rows[half:]))  # as `cat a.gz b.gz` makes it
    (folder / "rows.jsonl.gz").write_bytes(members)
    return str(folder / "rows.jsonl.gz")


def write_zstd(folder: Path, rows: Rows) -> str:
    (folder / "rows.jsonl.zst").write_bytes(pa.compress(as_lines(rows), codec="zstd", asbytes=True))
    return str(folder / "rows.jsonl.zst")


def write_parquet(folder: Path, rows: Rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet", row_group_size=7)
    return str(folder / "rows.parquet")


def write_files(folder: Path, rows: Rows) -> str:
    for number, part in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
        (folder / f"part{number}.jsonl").write_bytes(as_lines(part))
    return str(folder / "part*.jsonl")


def write_saved(folder: Path, rows: Rows) -> str:
    import datasets

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(list(rows))}).save_to_disk(folder / "saved")
    return str(folder / "saved")


def write_folder(folder: Path, rows: Rows) -> str:
    (folder / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "set" / "train-00000-of-00001.parquet")
    return str(folder / "set")


FILES = (write_lines, write_list, write_gzip, write_zstd, write_parquet, write_files)


FOLDERS = (write_saved, write_folder)


def read(path: str, *overrides: str, tokenizer: Any = None, kind: Kind = Kind.pairs) -> Examples:
    cfg = configured(kind, *overrides)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=path), loss=LOSSES[kind]())
    return read_examples(cfg, tokenizer or byte_tokenizer(), World(0, 1, ALONE))


def read_twice(cfg: Config, tokenizer: Any) -> tuple[Sequence[Example], ExampleSet]:
    """Read the rows by the product and by the second reader, and require that both say the same."""
    tokenizer.model_max_length = 1 << 60
    ours, meant = read_examples(cfg, tokenizer, World(0, 1, ALONE)), examples_of(cfg, tokenizer)
    for examples, wanted in ((ours.train, meant.train), (ours.held_out, meant.held_out)):
        for made, other in zip(examples, wanted, strict=False):
            assert made.origin.startswith(other.origin), f"{made.origin} stands where {other.origin} should"
            assert parts(made) == parts_meant(other), other.origin
        assert len(examples) == len(wanted), "other rows are left out"
    assert ours.mixture is None or ours.mixture.sizes == meant.sizes
    return ours.train, meant


def parts(made: Example) -> tuple[Any, ...]:
    answers = [(ids.tolist(), [True] * len(ids) if mask is None else mask.tolist()) for ids, mask in made.masked]
    return made.prompt.tolist(), answers, made.margin, made.label, made.text, made.expected


def parts_meant(example: TokenExample) -> tuple[Any, ...]:
    answers = [(ids.tolist(), example.masks[side].tolist()) for side, ids in example.answers.items()]
    return example.prompt.tolist(), answers, example.margin, example.label, example.text, example.right


class OfPairs(LossConfig):
    rows = Kind.pairs


class OfUnpaired(LossConfig):
    rows = Kind.unpaired


class OfSupervised(LossConfig):
    rows = Kind.supervised


class OfPrompts(LossConfig):
    rows, draws = Kind.prompts, True


LOSSES: dict[Kind, type[LossConfig]] = {each.rows: each for each in (OfPairs, OfUnpaired, OfSupervised, OfPrompts)}


@functools.cache
def configured(kind: Kind, *overrides: str) -> Config:
    of_kind = ["loss=grpo", "reward.text=a"] if kind is Kind.prompts else []
    return compose_config([
        "data=hf", "data.path=org/name", "data.max_length=200000", "launch.device=cpu", "logger.progress=false",
        "rollout.max_new_tokens=1", *of_kind, *overrides,
    ])  # fmt: skip


def ids(examples: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the token ids, masks and labels of examples, without where they came from."""
    return [tuple(_plain(value) for name, value in vars(each).items() if name != "origin") for each in examples]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
