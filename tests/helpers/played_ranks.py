"""Ranks played by threads of this process: what each gives to a collective call, all get. They start in no time, and
show whether a number is of all ranks, or only a mean of theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from rlexp.training.metrics.meter import Meter
from rlexp.training.world.groups import Ring, World

T = TypeVar("T")


class Played:
    def __init__(self, ranks: int, ring: int) -> None:
        rings = [tuple(range(first, first + ring)) for first in range(0, ranks, ring)]
        self.worlds = [World(rank, ranks, Ring(rank % ring, rings[rank // ring])) for rank in range(ranks)]
        self.given: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def gathered(self, mine: torch.Tensor, world: World) -> torch.Tensor:
        self.given[world.rank] = mine.clone()
        self.barrier.wait()
        everything = torch.stack(self.given)
        self.barrier.wait()
        return everything

    def alike(self, function: Callable[[World], T]) -> T:
        """Return what every rank returns."""
        with (
            patch("rlexp.training.metrics.meter._gather", self.gathered),
            ThreadPoolExecutor(len(self.worlds)) as threads,
        ):
            first, *others = threads.map(function, self.worlds)
        assert all(other == first for other in others)
        return first

    def metered(self, fill: Callable[[World, Meter], None]) -> dict[str, float]:
        def reduced(world: World) -> dict[str, float]:
            meter = Meter(world, torch.device("cpu"))
            fill(world, meter)
            return meter.reduce()

        return self.alike(reduced)
