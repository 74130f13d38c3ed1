"""Where rows come from: files, a folder, or a data set of the hub; and the work of making a store of each."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from rlexp.base.errors import DataError
from rlexp.base.file_hashes import contents, files_of
from rlexp.config.schema.data import BadRows, RowsDataConfig, TemplateUse
from rlexp.config.schema.data_sources import NamedSource
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset import hub
from rlexp.training.dataset.recipe import Recipe, name_of_row
from rlexp.training.dataset.row_files import READ, Files, PartOf, Unreadable, parsed
from rlexp.training.dataset.row_shapes import recognised
from rlexp.training.dataset.store_making import Work
from rlexp.training.dataset.tokens import Encoder, RowTokenizer

# Modules that decide a token, or how it is kept.
CODE = ("chat", "messages", "recipe", "row_files", "row_shapes", "seam", "store", "store_making", "tokens",
        "../../base/made_once")  # fmt: skip
LIBRARIES = ("datasets", "jinja2", "orjson", "pyarrow", "tokenizers", "transformers")
PLACES = ("name_or_path", "tokenizer_file", "is_local", "local_files_only", "cache_dir", "added_tokens_decoder")
MOST_WORKERS = 32


@dataclass(frozen=True)
class Split:
    """A source's rows to train on, or those held out."""

    source: NamedSource
    path: str
    split: str | None

    def opened(self, first: int | None) -> Files | hub.HubSplit:
        """Open the rows; of a streamed set, only so many of them."""
        files = files_of(self.path)
        if files:
            return Files(tuple(files))
        cfg, split = self.source.cfg, self.split or "train"
        return hub.table(self.source.key, self.path, cfg.subset, split, cfg.revision, cfg.streaming, first)


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
        first = split.source.cfg.max_samples or self.cfg.max_samples
        opened = split.opened(first)
        try:
            known = opened.contents()
        except OSError as error:
            raise DataError(
                f"{split.source.key}.path={split.path}: cannot be read ({error.strerror}). Give files that can be."
            ) from None
        names = functools.partial(name_of_row, opened.names)
        cfg, source = self.cfg, split.source
        system = source.cfg.system or cfg.system
        rows = RowTokenizer(self.tokenizer, use_template=cfg.template is TemplateUse.auto)
        self._refuse_unknown_options(rows)
        encoder = Encoder(rows, cfg.max_length, cfg.too_long, self.room)

        def recipe(parts: Iterator[PartOf]) -> Recipe:
            unreadable = ""
            for file, part in parts:
                for number, fields in parsed(part):
                    if not isinstance(fields, Unreadable):
                        shape = recognised(fields, self.kind, source.cfg.columns, names(file, number))
                        return Recipe(shape, encoder, names, cfg.bad_rows is BadRows.drop, system, cfg.template_options)
                    unreadable = unreadable or f"{names(file, number)}: {fields.rule}"
            raise DataError(unreadable or f"{split.path}: has no rows. Give {READ}.")

        facts = {
            "made_by": made_by(),
            "rows": known,
            "tokenizer": fingerprint(self.tokenizer),
            "kind": self.kind and self.kind.value,
            "columns": dict(sorted(source.cfg.columns.items())),
            "system": system,
            "template": [cfg.template.value, cfg.template_options],
            "length": [cfg.max_length, cfg.too_long.value, self.room],
            "bad_rows": cfg.bad_rows.value,
            **({} if first is None else {"max_samples": first}),
        }
        key = hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
        workers = cfg.workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        return key, Work(split.path, opened, first, names, recipe, known, workers, self.shown)

    def _refuse_unknown_options(self, rows: RowTokenizer) -> None:
        if not rows.chat.templated and self.cfg.template_options:
            raise DataError(
                f"data.template_options={dict(self.cfg.template_options)}: no chat template is used, so none takes "
                f"them. Leave them out, or give a template (model.chat_template=FILE, data.template=auto)."
            )
        template = str(getattr(self.tokenizer, "chat_template", ""))
        for name, value in self.cfg.template_options.items():
            if not re.search(rf"\b{re.escape(str(name))}\b", template):
                raise DataError(
                    f"data.template_options.{name}={value}: the chat template has no variable of this name. Look it up "
                    f"in the template, or leave it out."
                )


@functools.cache
def made_by() -> str:
    """Hash the code that makes tokens of rows, and the versions of the libraries that it uses."""
    own = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in CODE]
    versions = [f"{name} {version(name)}\n".encode() for name in LIBRARIES]
    return hashlib.sha256(b"".join([*own, *versions])).hexdigest()[:32]


def fingerprint(tokenizer: Any) -> str:
    """Hash what decides a text's tokens: vocabulary, rules, special tokens, settings and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kept = dict(getattr(tokenizer, "init_kwargs", {}))
    files = sorted(value for value in kept.values() if isinstance(value, str) and os.path.isfile(value))
    facts: Mapping[str, Any] = {
        "rules": backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        "files": [] if backend is not None else [contents(Path(file)) for file in files],
        "code": "" if backend is not None else _source_of(type(tokenizer)),
        "type": type(tokenizer).__name__,
        "template": getattr(tokenizer, "chat_template", None),
        "special": {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        "settings": {name: repr(value) for name, value in kept.items() if not _is_place(name, value)},
        "split": getattr(tokenizer, "split_special_tokens", None),
    }
    return hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def _is_place(name: str, value: Any) -> bool:
    """Say whether a setting tells where the tokenizer was found, which decides nothing."""
    return name in PLACES or name.endswith("_file") or (isinstance(value, str) and os.path.exists(value))


def _source_of(kind: type) -> str:
    """Return the code of a tokenizer that is written in Python."""
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return ""
