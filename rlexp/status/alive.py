"""Whether a run's processes live. It takes no lock to find out: that would refuse a run which starts at that moment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlexp.launch.run_folder import LOCK, RANKS

LOCKS, PROCESSES = Path("/proc/locks"), Path("/proc")
# Lines of processes that wait for a lock have an arrow in the second place, and do not match.
_LOCK = re.compile(r"\d+: \w+ +\w+ +\w+ +-?\d+ ([0-9a-f]+):([0-9a-f]+):(\d+) ")


class Locks:
    """The file locks on this machine at one moment."""

    def __init__(self) -> None:
        try:
            locks = [_LOCK.match(line) for line in LOCKS.read_text().splitlines()]
        except OSError:
            locks = []
        self._held = {(int(each[1], 16), int(each[2], 16), int(each[3])) for each in locks if each}

    def held(self, path: Path) -> bool:
        try:
            file = path.stat()
        except OSError:
            return False
        return (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino) in self._held

    def alive(self, folder: Path, known: Mapping[str, Any]) -> bool | None:
        """Whether the process that wrote `known` into a folder, or one of its ranks, lives; None on another machine."""
        if self.held(folder / LOCK) or self.held(folder / RANKS):
            return True
        if known.get("host") != socket.gethostname() or not (PROCESSES / "self").exists():
            return None
        return has_open(known.get("pid"), folder / LOCK)


def has_open(process: Any, path: Path) -> bool:
    """Whether a process has a file open.

    The kernel does not list the locks of every file system, and another process may have this id by now.
    """
    place = PROCESSES / str(process) / "fd"
    try:
        files = list(place.iterdir())
    except PermissionError:
        return True  # it is another user's process
    except OSError:
        return False
    return any(_leads_to(file, str(path.resolve())) for file in files)


def _leads_to(link: Path, path: str) -> bool:
    try:
        return os.readlink(link) == path
    except OSError:  # the file is closed by now
        return False
