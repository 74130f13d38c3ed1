"""Where rows come from: files, a folder, or a data set of the hub; and the work of making a store of each."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rlexp.config.schema import BadRows, RowsDataConfig, TemplateUse
from rlexp.config.sources import NamedSource
from rlexp.contents import contents
from rlexp.data import hub
from rlexp.data.files import Unreadable, parsed, parts_of
from rlexp.data.making import Work
from rlexp.data.recipe import Names, Recipe
from rlexp.data.shapes import recognised
from rlexp.data.tokens import Encoder, RowTokenizer
from rlexp.data.worker import PartOf
from rlexp.errors import DataError
from rlexp.types import Kind

FORMAT = 1  # of what is made of rows; another number makes every store anew
MOST_WORKERS = 32


@dataclass(frozen=True)
class Split:
    """A source's rows to train on, or those held out."""

    source: NamedSource
    path: str
    split: str | None

    def opened(self) -> Files | hub.Table:
        files = files_of(self.path)
        if files:
            return Files(tuple(files))
        cfg = self.source.cfg
        return hub.table(self.source.key, self.path, cfg.subset, self.split or "train", cfg.revision, cfg.streaming)


@dataclass(frozen=True)
class Files:
    """Files of rows, read one after the other."""

    paths: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.paths))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def contents(self) -> list[str]:
        return [contents(path) for path in self.paths]

    def parts(self) -> Iterator[PartOf]:
        before = 0
        for number, path in enumerate(self.paths):
            for part in parts_of(path):
                yield number, replace(part, done=before + part.done)
            before += path.stat().st_size


def files_of(path: str) -> list[Path]:
    """Return the file of this path, or the files that it matches (`data/*.jsonl`); none: a folder or the hub."""
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    return sorted(each for each in map(Path, glob.glob(str(file))) if each.is_file())


def splits_of(source: NamedSource, *, held_out: bool) -> Split | None:
    cfg = source.cfg
    if not held_out:
        return Split(source, cfg.path, cfg.split)
    if cfg.eval_path is not None or cfg.eval_split is not None:
        return Split(source, cfg.eval_path or cfg.path, cfg.eval_split)
    return None


@dataclass(frozen=True)
class Tokenizing:
    """What is the same for all sources of a run."""

    cfg: RowsDataConfig
    tokenizer: Any
    kind: Kind | None  # None: whatever the rows are
    room: int  # tokens kept for an answer
    shown: bool  # with a progress bar

    def work(self, split: Split) -> tuple[str, Work]:
        """Return the key of the store that holds a split's examples, and the work of making it."""
        opened = split.opened()
        names = Names(opened.names)
        cfg, source = self.cfg, split.source
        system = source.cfg.system or cfg.system
        encoder = Encoder(
            RowTokenizer(self.tokenizer, use_template=cfg.template is TemplateUse.auto),
            cfg.max_length,
            cfg.too_long,
            self.room,
        )

        def recipe(parts: Iterator[PartOf]) -> Recipe:
            for file, part in parts:
                for number, fields in parsed(part):
                    if not isinstance(fields, Unreadable):
                        shape = recognised(fields, self.kind, source.cfg.columns, names(file, number))
                        return Recipe(shape, encoder, names, cfg.bad_rows is BadRows.drop, system, cfg.template_options)
            raise _no_rows(split, opened)

        said = {
            "format": FORMAT,
            "rows": opened.contents(),
            "tokenizer": fingerprint(self.tokenizer),
            "kind": self.kind and self.kind.value,
            "columns": dict(sorted(source.cfg.columns.items())),
            "system": system,
            "template": [cfg.template.value, cfg.template_options],
            "length": [cfg.max_length, cfg.too_long.value, self.room],
            "bad_rows": cfg.bad_rows.value,
        }
        key = hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
        return key, Work(split.path, opened.parts, opened.size, names, recipe, workers_of(cfg.workers), self.shown)


def _no_rows(split: Split, opened: Files | hub.Table) -> DataError:
    for file, part in opened.parts():
        for number, fields in parsed(part):
            if isinstance(fields, Unreadable):
                return DataError(f"{opened.names[file]}:{number}: {fields.rule}")
    return DataError(f"{split.path}: has no rows. One JSON object per line is expected.")


def workers_of(asked: int | None) -> int:
    return asked or min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def fingerprint(tokenizer: Any) -> str:
    """Hash what decides a text's tokens: vocabulary, rules, special tokens, template, and the libraries' versions."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    said: Mapping[str, Any] = {
        "rules": rules,
        "type": type(tokenizer).__name__,
        "template": getattr(tokenizer, "chat_template", None),
        "special": {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        "libraries": hub.versions(),
    }
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
