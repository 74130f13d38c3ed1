"""Write files so that a reader sees the old content or the new, and never half of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, it takes the place of `path` in one step.

    The temporary file is removed when the block raises. Its name begins with a dot and holds the process id, so that
    two processes of a machine do not share one; a process that is killed may leave it behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write bytes. With `durable`, the content is on the disk before the file gets its name."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
        if durable:
            sync(temporary)


def open_to_others(path: Path) -> None:
    """Give a file the mode of any new file beside it: some libraries make files that their owner alone reads."""
    beside = path.with_name(f".{path.name}.mode")
    beside.touch()
    try:
        path.chmod(beside.stat().st_mode & 0o777)
    finally:
        beside.unlink()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
