"""The keys of `data`: one class for each kind of data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from rlexp.config.schema.bounds import number

PROMPT_AND_ANSWER = " (a prompt and an answer)"


class TooLong(Enum):
    """How a sequence longer than `data.max_length` is handled."""

    error = "error"  # the run ends with a message before it trains
    drop = "drop"  # the row is left out and counted
    truncate = "truncate"  # cut the prompt's start, after its begin-of-sequence token, then the end of the answers


class TemplateUse(Enum):
    """Whether rows are written by the tokenizer's chat template."""

    auto = "auto"  # use the tokenizer's template, if it has one
    never = "never"  # use the text of the rows unchanged: it already has the template's special tokens


class BadRows(Enum):
    """How a row that cannot be used is handled."""

    error = "error"  # the run ends with a message that names the row
    drop = "drop"  # the row is left out and counted


@dataclass
class DataConfig:
    name: str = MISSING  # the kind of the data, chosen by data=NAME
    # limit on the tokens of a prompt and an answer together; a generated answer counts as rollout.max_new_tokens
    max_length: int = number(2048, least=2, why=PROMPT_AND_ANSWER)
    too_long: TooLong = TooLong.error  # how a longer sequence is handled
    shuffle: bool = True  # draw a new order of the rows for each epoch; false: the order in which they are given
    drop_last: bool = True  # leave out the last batch of an epoch if it is not full; false: train on it
    # read each pair as two answers, a good and a bad one, for a loss that is trained on unpaired answers
    unpair: bool = False
    packing: bool = True  # lay the sequences of a micro-batch end to end; false: pad them to the longest
    # compute what sequences of a micro-batch have in common once: prompts of pairs, turns of conversations; null: true,
    # unless data.packing=false or parallel.backend leave no room for it
    share_prefix: bool | None = None


@dataclass
class SyntheticDataConfig(DataConfig):
    name: str = "synthetic"
    seed: int = 0  # fixes the pairs; `seed` fixes their order
    size: int = number(240, least=1)  # number of pairs to train on; reinforcement learning uses their prompts alone
    eval_size: int = number(32, least=0)  # further pairs, which are held out
    # begin each prompt with data.max_length words, to make long sequences; data.too_long=truncate then cuts them
    fill: bool = False


@dataclass
class ArithmeticDataConfig(DataConfig):
    name: str = "arithmetic"
    seed: int = 0  # fixes the sums; `seed` fixes their order
    size: int = number(1024, least=1)  # prompts to train on
    eval_size: int = number(64, least=0)  # further prompts, which are held out
    digits: int = number(1, least=1, most=100)  # largest number of digits of each number in a sum


@dataclass
class RowsDataConfig(DataConfig):
    """Keys that all data sets of rows share."""

    # rows that are held out and not trained on, the same ones with any `seed`: a number (200), or a share (0.05) of
    # those that are kept, rounded down and at least one; not with eval_path or eval_split
    eval_size: int | float = number(0, least=0)
    # read the first rows of each source alone, so many to train on and so many held out; null: all
    max_samples: int | None = number(None, least=1)
    # columns that have other names than rlexp's fields: `data.columns.prompt=problem` reads the field `prompt` from
    # the column `problem`
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None  # the system prompt of conversations without one; null: none
    template: TemplateUse = TemplateUse.auto  # whether the tokenizer's chat template is applied to the rows
    # options of the chat template: `data.template_options.enable_thinking=false`
    template_options: dict[str, Any] = field(default_factory=dict)
    bad_rows: BadRows = BadRows.error  # how a row that cannot be used is handled
    # folder of tokenized rows (in `tokens/`) and of the values of reference=precompute (in `reference/`); null: the
    # machine's cache folder
    cache: str | None = None
    workers: int | None = number(None, least=1, most=4096)  # processes that tokenize; null: one for each core


@dataclass
class JsonlDataConfig(RowsDataConfig):
    name: str = "jsonl"
    path: str = MISSING  # a file of rows
    eval_path: str | None = None  # a file of rows that are held out; null: none


@dataclass
class SplitConfig:
    """Which rows of a source are trained on, and which are held out."""

    eval_path: str | None = None  # files, a folder or a data set of the hub with rows that are held out; null: none
    subset: str | None = None  # the subset (configuration) of a data set; null: its only one
    split: str = "train"  # the split to train on; a part of one is quoted: `'data.split="train[:1000]"'`
    eval_split: str | None = None  # the split that is held out; null: none
    revision: str | None = None  # a branch, tag or commit of a data set of the hub; null: its main branch
    streaming: bool = False  # read a data set of the hub row by row; all rows are still read before the first step


@dataclass
class SourceConfig(SplitConfig):
    """Where rows come from: a file, files (`data/*.parquet`), a folder, or a data set of the hub."""

    path: str = MISSING  # a file, files (`'sets/*.parquet'`), a folder, or a data set of the hub
    columns: dict[str, str] = field(default_factory=dict)  # columns that have other names than rlexp's fields
    system: str | None = None  # the system prompt of this source's conversations without one; null: data.system
    max_samples: int | None = number(None, least=1)  # the first rows of this source alone; null: data.max_samples
    # share of the samples, relative to the other sources' weights; if no source has a weight, every row is taken
    weight: float | None = number(None, above=0)


@dataclass
class HFDataConfig(SplitConfig, RowsDataConfig):
    """Rows by the `datasets` library, from one source or from several with names: `{path: …, weight: 1.0, …}`."""

    name: str = "hf"
    # a file, files (`'sets/*.parquet'`), a folder, or a data set of the hub; null with data.sources
    path: str | None = None
    # several sources, each under a name of its own: `{NAME: {path: …, weight: 1.0, …}}`
    sources: dict[str, Any] = field(default_factory=dict)
