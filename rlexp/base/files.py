"""Write files so that a reader sees the old content or the new, and never half of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST = 1 << 28  # bytes of a run's file that is read whole


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, it takes the place of `path` in one step.

    The temporary file is removed when the block raises. Its name begins with a dot and holds the process id, so that
    two processes of a machine do not share one; a process that is killed may leave it behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        temporary.unlink()  # a link of somebody else's would be followed
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file that anybody may have made: a pipe would be waited for, and a device has no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        yield file


def read_regular(path: Path, most: int = MOST) -> bytes:
    """Return what is in such a file, if it has at most so many bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"has more than {most >> 20} MiB", str(path))
        return file.read()


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
