"""The folder on this machine for what is made once and used by many runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def root() -> Path:
    """Return `$RLEXP_CACHE`, or `rlexp` in the user's cache folder. It may not exist yet."""
    own, users = os.environ.get("RLEXP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    return (Path(users) if users and Path(users).is_absolute() else Path.home() / ".cache") / "rlexp"


def make(folder: Path) -> None:
    """Make a folder of the cache. In the user's own cache folder, the cache is the user's alone: it holds rows."""
    cache = root()
    if not os.environ.get("RLEXP_CACHE") and cache in (folder, *folder.parents) and not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path, waits: str = "") -> Iterator[None]:
    """Hold the lock of `path`, a file `.NAME.lock` beside it, in one process at a time; others say `waits`, and wait.

    The kernel releases it when its holder dies. An OSError says that the folder cannot be made or written to.
    """
    make(path.parent)
    with path.with_name(f".{path.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits:
                sys.stderr.write(f"rlexp: {waits}\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
