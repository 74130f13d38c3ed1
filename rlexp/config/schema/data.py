"""The keys of `data`: one class for each kind of data set, listed in `KINDS` of the schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from rlexp.config.schema.bounds import number

PROMPT_AND_ANSWER = " (a prompt and an answer)"


class TooLong(Enum):
    """How a sequence longer than `data.max_length` is handled."""

    error = "error"
    drop = "drop"
    truncate = "truncate"


class TemplateUse(Enum):
    """Whether rows are written by the tokenizer's chat template."""

    auto = "auto"  # if it has one
    never = "never"


class BadRows(Enum):
    """How a row that cannot be used is handled."""

    error = "error"
    drop = "drop"


@dataclass
class DataConfig:
    name: str = MISSING
    max_length: int = number(2048, least=2, why=PROMPT_AND_ANSWER)  # tokens of prompt and answer together
    too_long: TooLong = TooLong.error
    shuffle: bool = True
    drop_last: bool = True
    packing: bool = True


@dataclass
class SyntheticDataConfig(DataConfig):
    name: str = "synthetic"
    seed: int = 0  # for the pairs, not for their order
    size: int = number(240, least=1)
    eval_size: int = number(32, least=0)
    fill: bool = False  # put max_length words before each request, to make long sequences


@dataclass
class RowsDataConfig(DataConfig):
    """Keys that all data sets of rows share."""

    eval_size: int = number(0, least=0)  # rows that are held out of those to train on, if no others are
    columns: dict[str, str] = field(default_factory=dict)  # our field: the rows' column
    system: str | None = None  # the system prompt of conversations without one
    template: TemplateUse = TemplateUse.auto
    template_options: dict[str, Any] = field(default_factory=dict)  # as `enable_thinking: false`
    bad_rows: BadRows = BadRows.error
    cache: str | None = None  # folder of tokenized rows; null: tokens/ in the cache folder
    workers: int | None = number(None, least=1, most=4096)  # processes that tokenize; null: one a core


@dataclass
class JsonlDataConfig(RowsDataConfig):
    name: str = "jsonl"
    path: str = MISSING
    eval_path: str | None = None


@dataclass
class SplitConfig:
    """Which rows of a source are trained on, and which are held out."""

    eval_path: str | None = None
    subset: str | None = None
    split: str = "train"
    eval_split: str | None = None
    revision: str | None = None
    streaming: bool = False


@dataclass
class SourceConfig(SplitConfig):
    """Where rows come from: a file, files (`data/*.parquet`), a folder, or a data set of the hub."""

    path: str = MISSING
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    weight: float | None = number(None, above=0)  # share of the samples, relative to the other sources'


@dataclass
class HFDataConfig(SplitConfig, RowsDataConfig):
    """Rows by the `datasets` library, from one source or from several with names: `{path: …, weight: 1.0, …}`."""

    name: str = "hf"
    path: str | None = None
    sources: dict[str, Any] = field(default_factory=dict)


@dataclass
class ArithmeticDataConfig(DataConfig):
    name: str = "arithmetic"
    seed: int = 0
    size: int = number(1024, least=1)
    eval_size: int = number(64, least=0)
    digits: int = number(1, least=1, most=100)  # of each number in a sum
