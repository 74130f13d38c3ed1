"""Folders that are made once on a machine: under a lock, and gone on with where their maker was stopped.

A whole folder lies at its place. META in it holds the size of each file and its checksum, and a checksum of its own. A
folder in the making lies beside it, as `NAME.making`. Arrays are appended to its files block by block, and each block
is written down in a journal: so a maker that was killed goes on after the last whole block, wherever it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlexp.base.cache import locked
from rlexp.base.file_hashes import files_in, unchanged
from rlexp.base.files import sync, write_text

META, JOURNAL, MAKING = "meta.json", "journal.jsonl", ".making"
BLOCK = 1 << 24  # bytes that are read at once
Types = Mapping[str, Any]  # the dtype of each array


def in_the_making(place: Path) -> Path:
    return place.with_name(f"{place.name}{MAKING}")


def is_whole(place: Path) -> bool:
    """Say whether a folder is there and well. It is read whole when it was changed after it was last looked at."""
    return place.exists() and _wrong(place) is None


@contextlib.contextmanager
def making(place: Path, waits: str = "") -> Iterator[Path | None]:
    """Yield the folder in the making, with what was left in it, while others wait and say `waits`; None if there is
    nothing to make, since another has made it meanwhile. When the block ends well, the folder is sealed and gets its
    name. A whole one that is damaged is made anew."""
    with locked(place, waits):
        if place.exists() and (wrong := _wrong(place)) is not None:
            sys.stderr.write(f"rlexp: {place}: is damaged ({wrong}), and is made anew.\n")
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        if place.exists():
            yield None
            return
        unfinished = in_the_making(place)
        # A whole one's maker was killed before it had its name: it has lost its journal when it is on the disk.
        left = (unfinished / JOURNAL).exists() or damage(unfinished) is not None
        yield unfinished if left else None
        os.rename(unfinished, place)
        sync(place.parent)


def seal(folder: Path, meta: Mapping[str, Any], sums: Mapping[str, int] | None = None) -> None:
    """Complete a folder when all of it is on the disk. Without `sums`, its files are known by their sizes alone."""
    for path in folder.rglob("*"):
        sync(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files_in(folder)
             if path not in (folder / META, folder / JOURNAL)}  # fmt: skip
    own = {"name": _name(folder), "bytes": sizes, "crc32": dict(sums or {})}
    write_text(folder / META, _sealed({**meta, **own}))
    sync(folder / META)
    (folder / JOURNAL).unlink(missing_ok=True)
    sync(folder)


def meta_of(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    return meta


def damage(folder: Path) -> str | None:
    """Say what is wrong with a finished folder; None if nothing is. Reads all of it."""
    try:
        text = (folder / META).read_text(encoding="utf-8")
        meta = json.loads(text)
        if text != _sealed(meta):
            return f"{META} has other bytes than were written"
        if meta["name"] != _name(folder):
            return f"it was made as {meta['name']}"
        for name, size in meta["bytes"].items():
            actual = (folder / name).stat().st_size
            if actual != size:
                return f"{name} has {actual:,} bytes of {size:,}"
            if name in meta["crc32"]:
                with (folder / name).open("rb") as file:
                    if not _File(file).has(size, meta["crc32"][name]):
                        return f"{name} has other bytes than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _name(folder: Path) -> str:
    return folder.name.removesuffix(MAKING)


def _wrong(place: Path) -> str | None:
    try:
        if not (place / META).exists():
            return f"{META} is missing"
        return unchanged(place / META, lambda: damage(place), files_in(place))
    except OSError as error:  # another process takes a damaged folder away meanwhile
        return f"{type(error).__name__}: {error}"


def _sealed(meta: Mapping[str, Any]) -> str:
    """Write META with its own checksum."""
    plain = {name: value for name, value in meta.items() if name != "own_crc32"}
    own = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
    return json.dumps({**plain, "own_crc32": own}, indent=1, ensure_ascii=False) + "\n"


# ---- arrays ----


def mapped(path: Path, dtype: Any) -> np.ndarray:
    """Map an array into memory: only what is asked for is read."""
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass
class _File:
    """A file that is written or read on, with the size and checksum up to there."""

    handle: BinaryIO
    size: int = 0
    crc: int = 0

    def append(self, content: bytes) -> None:
        self.handle.write(content)
        self._pass(content)

    def has(self, size: int, crc: int) -> bool:
        """Read on, and return whether the file has so many bytes with that checksum."""
        while self.size < size and (content := self.handle.read(min(size - self.size, BLOCK))):
            self._pass(content)
        return (self.size, self.crc) == (size, crc)

    def _pass(self, content: bytes) -> None:
        self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)


class Appending:
    """Arrays in the making. `facts` are those of the blocks that are there."""

    def __init__(self, folder: Path, types: Types) -> None:
        self.folder, self.types = folder, types
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _File((folder / name).open("ab")) for name in types}
        self._journal = (folder / JOURNAL).open("ab")
        self.facts: list[Any] = []
        self._take_up()

    def length(self, name: str) -> int:
        """Return how many elements an array has."""
        return self._files[name].size // np.dtype(self.types[name]).itemsize

    def _take_up(self) -> None:
        """Go back to the last block of the journal whose bytes are all there as they were written."""
        good = 0
        with contextlib.ExitStack() as stack:
            reading = {name: _File(stack.enter_context((self.folder / name).open("rb"))) for name in self.types}
            for line in (self.folder / JOURNAL).read_bytes().splitlines(keepends=True):
                entry = _entry(line)
                if entry is None or not all(reading[name].has(*mark) for name, mark in entry["files"].items()):
                    break
                for name, (size, crc) in entry["files"].items():
                    self._files[name].size, self._files[name].crc = size, crc
                self.facts.append(entry["facts"])
                good += len(line)
        for file in self._files.values():
            file.handle.truncate(file.size)
        self._journal.truncate(good)

    def append(self, arrays: Mapping[str, np.ndarray], facts: Any) -> None:
        for name, dtype in self.types.items():
            self._files[name].append(arrays[name].astype(dtype).tobytes())
        for file in self._files.values():
            file.handle.flush()
        marks = {name: (file.size, file.crc) for name, file in self._files.items()}
        self._journal.write(json.dumps({"files": marks, "facts": facts}).encode() + b"\n")
        self._journal.flush()
        self.facts.append(facts)

    def finish(self, meta: Mapping[str, Any]) -> None:
        for handle in self._handles():
            handle.close()
        seal(self.folder, meta, {name: file.crc for name, file in self._files.items()})

    def close(self) -> None:
        for handle in self._handles():
            with contextlib.suppress(OSError):  # a full disk's, which `append` has raised
                handle.close()

    def _handles(self) -> list[BinaryIO]:
        return [*(file.handle for file in self._files.values()), self._journal]


def _entry(line: bytes) -> dict[str, Any] | None:
    """Read a line of the journal; None if it was torn."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return entry if line.endswith(b"\n") else None
