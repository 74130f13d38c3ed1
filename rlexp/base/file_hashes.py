"""Hashes of files, remembered: a file is read again only when its size, times or place on the disk changed."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlexp.base.cache import make, root
from rlexp.base.files import write_text

FRESH = 2.0  # seconds after its last change in which a file's times are not trusted


def files_of(path: str) -> list[Path]:
    """Return the file of this path, or the files that it matches (`data/*.jsonl`); none: a folder or the hub."""
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    return sorted(each for each in map(Path, glob.glob(str(file))) if each.is_file())


def files_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


def contents_of(files: Sequence[Path]) -> str:
    """Return one hash of several files, by their order."""
    return hashlib.sha256("".join(map(contents, files)).encode()).hexdigest()[:32]


def contents(path: Path) -> str:
    """Return the hash of a file's bytes."""
    return str(_remembered("contents", [path], lambda: _hashed(path)))


def unchanged(subject: Path, look: Callable[[], str | None], files: Sequence[Path]) -> str | None:
    """Return what `look` says of a subject, unless it was well and its files are as they were then."""
    problem = _remembered("well", [subject, *files], lambda: look() or "")
    return problem or None


def _hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _remembered(what: str, files: Sequence[Path], work: Callable[[], str]) -> str:
    """Return the result for files in their present state. What is empty is well, what is not is not remembered."""
    state = [_state(file) for file in sorted(set(files))]
    name = hashlib.sha256(f"{what}:{os.path.realpath(files[0])}".encode()).hexdigest()[:32]
    note = root() / "notes" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        held: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        if held["state"] == state:
            return str(held["result"])
    result = work()
    if any(time.time() - each[-1] / 1e9 < FRESH for each in state):
        return result  # a change in the same tick of the clock would not be seen
    with contextlib.suppress(OSError):  # without a note it is read again
        make(note.parent)
        write_text(note, json.dumps({"state": state, "result": result}))
    return result


def _state(path: Path) -> list[Any]:
    """Return what changes with a file's bytes; the time of its last change of any kind cannot be set."""
    stat = path.stat()
    return [str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
