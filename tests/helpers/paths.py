"""Folders that tests read from, a disk that fills, and the environment of a `make` that a test starts."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "files"
# What a `make` that runs these tests tells its own children, and a chosen interpreter: neither is in a fresh clone.
INHERITED = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "VENV")


def outside_make() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in INHERITED}


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Raise OSError where a file of this process would grow beyond a size, as a disk does that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
