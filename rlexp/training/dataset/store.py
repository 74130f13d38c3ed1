"""Tokenized examples on disk, read through memory maps: a rank holds what its samples need, however many there are.

A store is a folder: `tokens` (int32, all parts of all examples), `ends` (int64, where each part ends), `rows` (int64,
file and row of each example), `extra` (JSON of what is no token, where there is any) with `extra_ends`, `bad` (a line
of JSON for each unusable row that was left out), and meta.json. The same rows, tokenizer and options make the same
bytes.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import orjson

from rlexp.base.files import sync, write_text
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset.messages import as_text
from rlexp.training.dataset.tokens import Example, typed
from rlexp.training.types import Completion, Ids, Mask, Pair, Prompt, Row

META, JOURNAL = "meta.json", "journal.jsonl"
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

    @staticmethod
    def of(plain: Mapping[str, Any]) -> StoreFacts:
        return StoreFacts(**plain)


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


def labels_of(rows: Iterable[Row]) -> tuple[int, int]:
    """Count the good answers, and the bad ones, of rows that have labels."""
    labels = [row.label for row in rows if row.label is not None]
    return labels.count(True), labels.count(False)


def _extra(example: Example) -> bytes:
    row = example.row
    held: dict[str, Any] = {}
    if not example.answers:
        held = {"text": as_text(row.prompt), "expected": row.expected}
    if row.label is not None:
        held["label"] = row.label
    if row.margin is not None:
        held["margin"] = row.margin
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


class Store(Sequence[Pair | Completion | Prompt]):
    """The examples of a folder. `first` is the place of its first example in the whole data set."""

    def __init__(self, folder: Path, origin: Origin, first: int = 0) -> None:
        self.meta = json.loads((folder / META).read_text(encoding="utf-8"))
        self.kind, self.facts = Kind(self.meta["kind"]), StoreFacts.of(self.meta["facts"])
        self.folder, self.origin, self.first = folder, origin, first
        self._arrays = {name: _mapped(folder / name, dtype) for name, dtype in TYPES.items()}

    def __len__(self) -> int:
        return len(self._arrays["rows"]) // 2

    @overload
    def __getitem__(self, index: int) -> Pair | Completion | Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair | Completion | Prompt]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return typed(self.kind, self.first + index % len(self), self._example(index % len(self)))

    def _example(self, index: int) -> Example:
        arrays, parts = self._arrays, PARTS[self.kind]
        ends = arrays["ends"][max(0, index * parts - 1) : (index + 1) * parts]
        starts = ends if index else np.concatenate(([0], ends))
        ids: list[Ids] = [
            np.array(arrays["tokens"][a:b]) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ]
        extra = self._extra(index)
        masks = tuple(map(_mask, extra.get("masks", [None] * (parts - 1))))
        said: dict[str, Any] = {name: extra.get(name) for name in ("label", "expected", "margin")}
        row = Row(extra.get("text", ""), (), self.origin_of(index), **said)
        return Example(row, ids[0], tuple(ids[1:]), masks)

    def _extra(self, index: int) -> dict[str, Any]:
        ends = self._arrays["extra_ends"]
        start, end = int(ends[index - 1]) if index else 0, int(ends[index])
        held: dict[str, Any] = orjson.loads(self._arrays["extra"][start:end].tobytes()) if end > start else {}
        return held

    def origin_of(self, index: int) -> str:
        file, row = self._arrays["rows"][2 * index : 2 * index + 2].tolist()
        return self.origin(file, row)

    def bad_rows(self) -> Iterator[str]:
        """Yield the rows that were left out as unusable, with the reason."""
        for line in (self.folder / "bad").read_bytes().splitlines():
            bad = orjson.loads(line)
            yield f"{self.origin(bad['file'], bad['row'])}: {bad['said']}"

    def lengths(self) -> np.ndarray:
        """Return (examples, parts): the tokens of each prompt and answer."""
        return np.diff(self._arrays["ends"], prepend=0).reshape(-1, PARTS[self.kind])

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

    def highest(self) -> tuple[int, str]:
        """Return the highest token id, and a row that has it."""
        return self._with_origin(self.facts.highest)

    def no_margin(self) -> tuple[int, str]:
        """Return the number of examples without a margin, and the row of the first."""
        return self._with_origin(self.facts.no_margin)

    def _with_origin(self, fact: Sequence[int]) -> tuple[int, str]:
        number, file, row = map(int, fact)
        return number, self.origin(file, row)


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass
class _File:
    handle: BinaryIO
    size: int = 0
    crc: int = 0

    def append(self, content: bytes) -> None:
        self.handle.write(content)
        self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)


class Appending:
    """A store in the making. Each block is written down in a journal, so that one that was stopped goes on after the
    last whole block, wherever it was killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _File((folder / name).open("ab")) for name in TYPES}
        self._journal = (folder / JOURNAL).open("ab")
        self.blocks, self.facts = self._take_up()
        self._ends = {name: self._total(of, dtype) for name, of, dtype in
                      (("ends", "tokens", np.int32), ("extra_ends", "extra", np.uint8))}  # fmt: skip

    def _total(self, name: str, dtype: Any) -> int:
        return self._files[name].size // np.dtype(dtype).itemsize

    def _take_up(self) -> tuple[int, StoreFacts]:
        """Go back to the last block of the journal whose bytes are all there as they were written."""
        blocks, facts, good = 0, StoreFacts(), 0
        reading = {name: _Checked(self.folder / name) for name in TYPES}
        with contextlib.ExitStack() as closing:
            for each in reading.values():
                closing.callback(each.handle.close)
            for line in (self.folder / JOURNAL).read_bytes().splitlines(keepends=True):
                entry = _entry(line)
                if entry is None or not all(reading[name].has(*mark) for name, mark in entry["files"].items()):
                    break
                for name, (size, crc) in entry["files"].items():
                    self._files[name].size, self._files[name].crc = size, crc
                blocks, facts, good = blocks + 1, facts + StoreFacts.of(entry["facts"]), good + len(line)
        for file in self._files.values():
            file.handle.truncate(file.size)
        self._journal.truncate(good)
        return blocks, facts

    def append(self, block: Block) -> None:
        for name, dtype in TYPES.items():
            array = block.arrays[name].astype(dtype)
            if name in self._ends:
                array += self._ends[name]
            self._files[name].append(array.tobytes())
        for name, of in (("ends", "tokens"), ("extra_ends", "extra")):
            self._ends[name] += len(block.arrays[of])
        self.blocks, self.facts = self.blocks + 1, self.facts + block.facts
        for file in self._files.values():
            file.handle.flush()
        marks = {name: (file.size, file.crc) for name, file in self._files.items()}
        self._journal.write(orjson.dumps({"files": marks, "facts": vars(block.facts)}) + b"\n")
        self._journal.flush()

    def finish(self, kind: Kind, said: Mapping[str, Any]) -> None:
        """Complete the folder; it can be opened when it has its meta.json."""
        self.close()
        files = {name: file.size for name, file in self._files.items()}
        crcs = {name: file.crc for name, file in self._files.items()}
        for name in TYPES:
            sync(self.folder / name)
        meta = {"kind": kind.value, **said, "facts": vars(self.facts), "bytes": files, "crc32": crcs}
        write_text(self.folder / META, _sealed(meta))
        sync(self.folder / META)
        (self.folder / JOURNAL).unlink()
        sync(self.folder)

    def close(self) -> None:
        for file in self._files.values():
            file.handle.close()
        self._journal.close()


def _sealed(meta: Mapping[str, Any]) -> str:
    """Write meta.json with its own checksum."""
    plain = {name: value for name, value in meta.items() if name != "own_crc32"}
    own = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
    return json.dumps({**plain, "own_crc32": own}, indent=1, ensure_ascii=False) + "\n"


def _entry(line: bytes) -> dict[str, Any] | None:
    """Read a line of the journal; None if it was torn."""
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if line.endswith(b"\n") else None


class _Checked:
    """Reads a file on, from mark to mark."""

    def __init__(self, path: Path) -> None:
        self.handle, self.size, self.crc = path.open("rb"), 0, 0

    def has(self, size: int, crc: int) -> bool:
        """Return whether the file has so many bytes with that checksum."""
        while self.size < size:
            content = self.handle.read(min(size - self.size, 1 << 24))
            if not content:
                return False
            self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)
        return self.crc == crc


def is_finished(folder: Path) -> bool:
    """Say whether a folder is a whole store: it loses its journal when all of it is on the disk."""
    return (folder / META).exists() and not (folder / JOURNAL).exists() and damage(folder) is None


def damage(folder: Path) -> str | None:
    """Say what is wrong with a finished store; None if nothing is. Reads all of it."""
    try:
        text = (folder / META).read_text(encoding="utf-8")
        meta = json.loads(text)
        if text != _sealed(meta):
            return f"{META} has other bytes than were written"
        for name, size in meta["bytes"].items():
            there = (folder / name).stat().st_size
            if there != size:
                return f"{name} has {there:,} bytes of {size:,}"
            with contextlib.closing((checked := _Checked(folder / name)).handle):
                if not checked.has(size, meta["crc32"][name]):
                    return f"{name} has other bytes than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
