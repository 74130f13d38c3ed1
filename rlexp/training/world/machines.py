"""Which ranks are on one machine, by a folder that they see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rlexp.base import cache
from rlexp.base.errors import DataError
from rlexp.training.world.objects import gather_objects

BOOT = Path("/proc/sys/kernel/random/boot_id")


def leaders_of(folder: Path, refusal: Callable[[OSError], str], size: int) -> list[int]:
    """Return, for each rank, the first rank of its machine. A collective call.

    If there can be no folder somewhere, all ranks raise what `refusal` makes of the error.
    """
    machines = gather_objects(_machine(folder, refusal), size)
    for each in machines:
        if isinstance(each, str):
            raise DataError(each)
    return [machines.index(each) for each in machines]


def _machine(folder: Path, refusal: Callable[[OSError], str]) -> tuple[str, int, int] | str:
    """Return what ranks share that can use one folder: the kernel that runs them, and the folder; or the refusal."""
    try:
        cache.make(folder)
        stat = folder.stat()
    except OSError as error:
        return refusal(error)
    return (BOOT.read_text() if BOOT.exists() else os.uname().nodename), stat.st_dev, stat.st_ino
