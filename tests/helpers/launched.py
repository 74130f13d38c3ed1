"""Rank functions of the launcher's tests."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlexp.launch.joining import RankSpec, join, launch_on


def fail(spec: RankSpec) -> None:
    join(spec, launch_on("cpu", 60.0))
    dist.all_reduce(torch.zeros(1))
    if spec.rank == 2:
        raise ZeroDivisionError("on purpose")
    dist.all_reduce(torch.zeros(1))


def whereabouts(spec: RankSpec) -> tuple[int, int]:
    return spec.rank, spec.world_size


def fail_when_broken_off(spec: RankSpec, folder: str) -> None:
    """Fail in a `finally` when interrupted, as OmegaConf does when it restores what is not there yet."""
    try:
        (Path(folder) / f"rank{spec.rank}").touch()
        time.sleep(60)
    finally:
        raise AttributeError("of a finally")
