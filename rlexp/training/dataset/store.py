"""Tokenized examples on disk, read through memory maps: a rank holds what its samples need, however many there are.

A store is a folder: `tokens` (int32, all parts of all examples), `ends` (int64, where each part ends), `rows` (int64,
file and row of each example), `extra` (JSON of what is no token, where there is any) with `extra_ends`, `bad` (a line
of JSON for each unusable row that was left out), and meta.json. The same rows, tokenizer and options make the same
bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson

from rlexp.base.made_once import Appending, mapped, meta_of
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.types import Example, Ids, Mask

TYPES = {"tokens": np.int32, "ends": np.int64, "rows": np.int64, "extra": np.uint8, "extra_ends": np.int64,
         "bad": np.uint8}  # fmt: skip
PARTS = {Kind.pairs: 3, Kind.unpaired: 2, Kind.supervised: 2, Kind.prompts: 1}  # a prompt and its answers
Origin = Callable[[int, int], str]  # the name of a row, from its file's number and its own


@dataclass(frozen=True)
class StoreFacts:
    """What happened to a part's rows, beside the examples that they became."""

    read: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    firsts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # file and row of the first by reason
    highest: Sequence[int] = (-1, 0, 0)  # the highest token id, with its file and row
    no_margin: Sequence[int] = (0, 0, 0)  # the number of examples without one, with file and row of the first
    labels: Sequence[int] = (0, 0)  # of unpaired answers: how many are good, and how many bad

    def __add__(self, other: StoreFacts) -> StoreFacts:
        counts = Counter(self.counts) + Counter(other.counts)
        return StoreFacts(
            self.read + other.read,
            dict(sorted(counts.items())),
            dict(sorted({**other.firsts, **self.firsts}.items())),
            max(self.highest, other.highest, key=lambda each: each[0]),
            (self.no_margin[0] + other.no_margin[0], *(self if self.no_margin[0] else other).no_margin[1:]),
            [ours + theirs for ours, theirs in zip(self.labels, other.labels, strict=True)],
        )


@dataclass(frozen=True)
class Block:
    """The examples of a part as they are appended."""

    arrays: Mapping[str, np.ndarray]  # `ends` and `extra_ends` count from the block's beginning
    facts: StoreFacts


def block_of(kept: Sequence[tuple[int, int, Example]], bad: Sequence[Mapping[str, Any]], facts: StoreFacts) -> Block:
    """Lay out examples with their files and rows."""
    parts = [part for _, _, example in kept for part in (example.prompt, *example.answers)]
    extras = [_extra(example) for _, _, example in kept]
    return Block(
        {
            "tokens": np.concatenate(parts) if parts else np.zeros(0, np.int32),
            "ends": np.cumsum([len(part) for part in parts], dtype=np.int64),
            "rows": np.array([place for file, row, _ in kept for place in (file, row)], dtype=np.int64),
            "extra": np.frombuffer(b"".join(extras), dtype=np.uint8),
            "extra_ends": np.cumsum([len(extra) for extra in extras], dtype=np.int64),
            "bad": np.frombuffer(b"".join(orjson.dumps(each) + b"\n" for each in bad), dtype=np.uint8),
        },
        facts,
    )


def labels_of(examples: Iterable[Example]) -> tuple[int, int]:
    """Count the good answers, and the bad ones, of examples that have labels."""
    labels = [example.label for example in examples if example.label is not None]
    return labels.count(True), labels.count(False)


def _extra(example: Example) -> bytes:
    held: dict[str, Any] = {}
    if not example.answers:
        held = {"text": example.text, "expected": example.expected}
    if example.label is not None:
        held["label"] = example.label
    if example.margin is not None:
        held["margin"] = example.margin
    if any(mask is not None for mask in example.masks):
        held["masks"] = [None if mask is None else _runs(mask) for mask in example.masks]
    return orjson.dumps(held) if held else b""


def _runs(mask: Mask) -> list[int]:
    """Write a mask as the lengths of its runs, of which the first is untrained."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=not mask[-1]))
    return np.diff(edges, prepend=0).tolist()


def _mask(runs: Sequence[int] | None) -> Mask | None:
    if runs is None:
        return None
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


class View(Sequence[Example]):
    """Examples; a class says which one stands at a place, how many there are, and how long they are."""

    @abstractmethod
    def at(self, index: int) -> Example:
        """Return the example at a place from 0 on."""

    @abstractmethod
    def lengths(self, places: np.ndarray) -> np.ndarray:
        """Return (places, parts): the tokens of the prompt and of each answer, at some places in order."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.at(index % len(self))


class Store(View):
    """The examples of a folder."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.meta = meta_of(folder)
        self.kind, self.facts = Kind(self.meta["kind"]), StoreFacts(**self.meta["facts"])
        self.folder, self.origin = folder, origin
        self._arrays = {name: mapped(folder / name, dtype) for name, dtype in TYPES.items()}

    def __len__(self) -> int:
        return len(self._arrays["rows"]) // 2

    def at(self, index: int) -> Example:
        arrays, parts = self._arrays, PARTS[self.kind]
        ends = arrays["ends"][max(0, index * parts - 1) : (index + 1) * parts]
        starts = ends if index else np.concatenate(([0], ends))
        ids: list[Ids] = [
            np.array(arrays["tokens"][a:b]) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        first, last = int(arrays["extra_ends"][index - 1]) if index else 0, int(arrays["extra_ends"][index])
        extra = orjson.loads(arrays["extra"][first:last].tobytes()) if last > first else {}
        masks = tuple(map(_mask, extra.get("masks", [None] * (parts - 1))))
        facts = {name: extra[name] for name in ("label", "margin", "text", "expected") if name in extra}
        file, row = arrays["rows"][2 * index : 2 * index + 2].tolist()
        return Example(index, ids[0], tuple(ids[1:]), masks, self.origin(file, row), **facts)

    def bad_rows(self) -> Iterator[str]:
        """Yield the rows that were left out as unusable, with the reason."""
        for line in (self.folder / "bad").read_bytes().splitlines():
            bad = orjson.loads(line)
            yield f"{self.origin(bad['file'], bad['row'])}: {bad['said']}"

    def lengths(self, places: np.ndarray | None = None) -> np.ndarray:
        """Return (examples, parts): the tokens of each prompt and answer, of some examples or of all."""
        parts, ends = PARTS[self.kind], self._arrays["ends"]
        if places is None:
            return np.diff(ends, prepend=0).reshape(-1, parts)
        last = places[:, None] * parts + np.arange(parts)
        return ends[last] - np.where(last > 0, ends[last - 1], 0)

    def blocks(self, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tokens of whole examples, about so many at a time, and where among them each part ends."""
        parts, ends = PARTS[self.kind], self._arrays["ends"]
        of_examples = ends[parts - 1 :: parts]
        first = start = 0
        while first < len(self):
            last = max(first + 1, int(np.searchsorted(of_examples, start + most, side="right")))
            stop = int(of_examples[last - 1])
            yield np.array(self._arrays["tokens"][start:stop]), ends[first * parts : last * parts] - start
            first, start = last, stop

    def named(self, fact: Sequence[int]) -> tuple[int, str]:
        """Return the number of one of the facts, and the name of its row."""
        number, file, row = map(int, fact)
        return number, self.origin(file, row)


class StoreInTheMaking(Appending):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TYPES)

    def add(self, block: Block) -> None:
        arrays = dict(block.arrays)
        for ends, of in (("ends", "tokens"), ("extra_ends", "extra")):
            arrays[ends] = arrays[ends] + self.length(of)
        self.append(arrays, vars(block.facts))

    def complete(self, kind: Kind, shape: Mapping[str, Any]) -> None:
        facts = sum((StoreFacts(**each) for each in self.facts), start=StoreFacts())
        self.finish({"kind": kind.value, **shape, "facts": vars(facts)})
