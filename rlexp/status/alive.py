"""Whether a run's processes live. No lock is taken to find out: a run that begins just then would be refused."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlexp.launch.folder import LOCK, RANKS

LOCKS, PROCESSES = Path("/proc/locks"), Path("/proc")
_LOCK = re.compile(
    r"\d+: \w+ +\w+ +\w+ +-?\d+ ([0-9a-f]+):([0-9a-f]+):(\d+) "
)  # of who waits for one, an arrow is second


class Locks:
    """What is locked on this machine, at one moment."""

    def __init__(self) -> None:
        try:
            found = [_LOCK.match(line) for line in LOCKS.read_text().splitlines()]
        except OSError:
            found = []
        self._held = {(int(each[1], 16), int(each[2], 16), int(each[3])) for each in found if each}

    def held(self, path: Path) -> bool:
        try:
            file = path.stat()
        except OSError:
            return False
        return (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino) in self._held

    def alive(self, folder: Path, known: Mapping[str, Any]) -> bool | None:
        """Whether who wrote `known` into a folder lives, or a rank that it started; None where that cannot be seen:
        on another machine."""
        if self.held(folder / LOCK) or self.held(folder / RANKS):
            return True
        if known.get("host") != socket.gethostname() or not (PROCESSES / "self").exists():
            return None
        return has_open(known.get("pid"), folder / LOCK)


def has_open(process: Any, path: Path) -> bool:
    """Whether a process has a file open. Not every file system's locks are listed, and a process's number may be
    another's by now."""
    place = PROCESSES / str(process) / "fd"
    try:
        files = list(place.iterdir())
    except PermissionError:
        return True  # another user's
    except OSError:
        return False
    return any(_leads_to(file, str(path.resolve())) for file in files)


def _leads_to(link: Path, path: str) -> bool:
    try:
        return os.readlink(link) == path
    except OSError:  # closed by now
        return False
