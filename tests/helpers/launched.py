"""Rank functions of the launcher's tests."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlexp.launch.place import Place, join


def fail(place: Place) -> None:
    join(place, "cpu", 60)
    dist.all_reduce(torch.zeros(1))
    if place.rank == 2:
        raise ZeroDivisionError("on purpose")
    dist.all_reduce(torch.zeros(1))


def whereabouts(place: Place) -> tuple[int, int]:
    return place.rank, place.world_size


def fail_when_broken_off(place: Place, folder: str) -> None:
    """Fail in a `finally` when interrupted, as OmegaConf does when it restores what is not there yet."""
    try:
        (Path(folder) / f"rank{place.rank}").touch()
        time.sleep(60)
    finally:
        raise AttributeError("of a finally")
