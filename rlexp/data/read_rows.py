"""Read and tokenize a run's rows in one process, whatever kind they are, by the code and the stores of training."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlexp.base import cache
from rlexp.base.errors import DataError
from rlexp.config.schema import Config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.data_sources import sources_of, weights_of
from rlexp.config.schema.row_kinds import Kind
from rlexp.data.facts import Reason, SourceFacts
from rlexp.data.sharing import blocks_of, hashes
from rlexp.training.dataset.recipe import UNUSABLE
from rlexp.training.dataset.sources import Split, Tokenizing, splits_of
from rlexp.training.dataset.store import PARTS, Store
from rlexp.training.dataset.store_making import store_of
from rlexp.training.dataset.views import Joined
from rlexp.training.train.examples import Examples, examples_of, generated_rows, kind_read, read_examples, unpaired
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World

SAID = 5  # unusable rows that are named


@dataclass(frozen=True)
class Rows:
    """The rows of the kind that is trained on, or else of the first kind that was found."""

    kind: Kind
    examples: Examples
    lengths: np.ndarray  # (examples to train on, parts)
    hashes: np.ndarray  # (examples to train on, 2)
    sources: tuple[SourceFacts, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class _Opened:
    split: Split
    held_out: bool
    store: Store


def read_rows(cfg: Config, tokenizer: Any) -> Rows:
    if not isinstance(cfg.data, RowsDataConfig):
        return _generated(cfg, cfg.loss.rows, tokenizer)
    rows = _stored(cfg, cfg.data, kind_read(cfg), tokenizer)
    if not cfg.data.unpair or rows.kind is not Kind.pairs:
        return rows
    # Each pair is two answers, each with the prompt.
    examples, lengths = unpaired(rows.examples), rows.lengths[:, [0, 1, 0, 2]].reshape(-1, 2)
    digests = hashes(blocks_of(examples.train, ids_of), PARTS[Kind.unpaired])
    sources = tuple(each if each.per_epoch is None else replace(each, per_epoch=2 * each.per_epoch)
                    for each in rows.sources)  # fmt: skip
    return replace(rows, kind=Kind.unpaired, examples=examples, lengths=lengths, hashes=digests, sources=sources)


def ids_of(example: Example) -> tuple[np.ndarray, ...]:
    """Return the tokens of an example: those of its prompt, then of its answers."""
    return (example.prompt, *example.answers)


# ---- rows of files and of the hub ----


def _stored(cfg: Config, data: RowsDataConfig, needs: Kind, tokenizer: Any) -> Rows:
    room = cfg.rollout.max_new_tokens if needs is Kind.prompts else 0
    folder = Path(data.cache).expanduser() if data.cache else cache.root()
    sources = sources_of(data)
    opened = []
    for held_out in (False, True):
        for source in sources:
            if (split := splits_of(source, held_out=held_out)) is not None:
                shown = cfg.logger.progress and sys.stderr.isatty()
                opened.append(_Opened(split, held_out, _store(data, tokenizer, needs, room, shown, split, folder)))
    kinds = [each.store.kind for each in opened if not each.held_out]
    kind = needs if needs in kinds else kinds[0]
    train, held = ([each.store for each in opened if each.held_out is out and each.store.kind is kind]
                   for out in (False, True))  # fmt: skip
    whole = len(train) == len(sources)
    examples = examples_of(data, train, held, weights_of(sources) if whole else None)
    assert isinstance(examples.train, Joined)
    sizes, places = examples.train.sizes(), examples.train.places
    counts = iter(zip(sizes, examples.mixture.counts if examples.mixture is not None else sizes, strict=True))
    taken: Any = slice(None) if places is None else np.delete(np.arange(places.total), places.out)
    return Rows(
        kind,
        examples,
        np.concatenate([store.lengths() for store in train] or [np.zeros((0, PARTS[kind]), np.int64)])[taken],
        np.concatenate([hashes(blocks_of(store, ids_of), PARTS[kind]) for store in train]
                       or [np.zeros((0, 2), np.int64)])[taken],
        tuple(_source(each, *((0, None) if each.held_out or each.store.kind is not kind else next(counts)))
              for each in opened),
        tuple(reason for each in opened for reason in _reasons(each)),
    )  # fmt: skip


def _store(
    cfg: RowsDataConfig, tokenizer: Any, needs: Kind, room: int, shown: bool, split: Split, folder: Path
) -> Store:
    """Return the store that training reads; of rows that it cannot train on, one of whatever they are."""
    key, work = Tokenizing(cfg, tokenizer, needs, room, shown).work(split)
    try:
        work.recipe(work.parts())
    except DataError as refused:
        key, work = Tokenizing(cfg, tokenizer, None, room, shown).work(split)
        try:
            work.recipe(work.parts())
        except DataError:
            raise refused from None  # it says what the run needs
    return store_of(folder, key, work)


def _source(opened: _Opened, taken: int, per_epoch: int | None) -> SourceFacts:
    split, store = opened.split, opened.store
    path = split.path if split.split in (None, "train") else f"{split.path}[{split.split}]"
    shape = str(store.meta["shape"])
    return SourceFacts(
        split.source.key, path, opened.held_out, shape, store.kind.value, store.facts.read, len(store),
        int(store.lengths().sum()), None if opened.held_out else split.source.cfg.weight, taken, per_epoch,
    )  # fmt: skip


def _reasons(opened: _Opened) -> list[Reason]:
    store, reasons = opened.store, []
    for what, count in store.facts.counts.items():
        file, row = map(int, store.facts.firsts[what])
        listed = (str(store.folder / "bad"), tuple(islice(store.bad_rows(), SAID))) if what == UNUSABLE else ()
        reasons.append(Reason(opened.split.source.key, opened.held_out, what, count, store.origin(file, row), *listed))
    return reasons


# ---- generated rows ----


def _generated(cfg: Config, kind: Kind, tokenizer: Any) -> Rows:
    examples = read_examples(cfg, tokenizer, World(0, 1, ALONE))
    read = [len(rows) * (2 if cfg.data.unpair else 1) for rows in generated_rows(cfg.data, kind_read(cfg))]
    sources, reasons = [], []
    for held_out, kept, dropped in ((False, examples.train, examples.dropped),
                                    (True, examples.held_out, examples.held_out_dropped)):  # fmt: skip
        if not read[held_out]:
            continue
        tokens = sum(len(part) for example in kept for part in ids_of(example))
        taken = (0, None) if held_out else (len(kept), len(kept))
        sources.append(SourceFacts("data", cfg.data.name, held_out, f"{kind.value}, generated from a seed", kind.value,
                              read[held_out], len(kept), tokens, None, *taken))  # fmt: skip
        reasons += [Reason("data", held_out, what, count, None) for what, count in sorted(dropped.items())]
    lengths = np.array([[len(part) for part in ids_of(example)] for example in examples.train], dtype=np.int64)
    digests = hashes(blocks_of(examples.train, ids_of), PARTS[kind])
    return Rows(kind, examples, lengths, digests, tuple(sources), tuple(reasons))
