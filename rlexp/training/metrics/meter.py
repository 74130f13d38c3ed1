"""Sums and counts over the micro-batches of a train batch, reduced over the ranks once per optimizer step.

A sum is *sharded* over the ring (token sums: every rank of the ring holds the part of its own tokens, and the parts are
added up) or *replicated* in it (sequence sums after the ring's all-reduce: every rank holds the same sum, which is
counted once). Getting this wrong by a factor of the ring size is the classic defect, so every metric says which it is.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.training.world.groups import Traffic, Watcher, World


class Spread(Enum):
    SHARDED = "sharded"
    REPLICATED = "replicated"


SHARDED, REPLICATED = Spread.SHARDED, Spread.REPLICATED
Value = Tensor | float


class Meter:
    """Sums, counts and maxima by name. Every rank must add the same names.

    Until `reduce`, the device's values stay on the device and the host's on the host: adding one never waits.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self._sums: dict[str, Value] = {}
        self._counts: dict[str, Value] = {}
        self._maxima: dict[str, Value] = {}
        self._spreads: dict[str, float] = {}
        self._differences: dict[str, tuple[str, str]] = {}

    def add_mean(self, name: str, total: Value, count: Value, spread: Spread) -> None:
        """Add a part of a mean. The mean that is logged is Σ total / Σ count over the whole train batch."""
        self._add(self._sums, name, total, spread)
        self._add(self._counts, name, count, spread)

    def add_total(self, name: str, total: Value, spread: Spread) -> None:
        self._add(self._sums, name, total, spread)

    def add_difference(self, name: str, one: str, other: str) -> None:
        """Log the mean of one name less that of another, where the train batch has both."""
        self._differences[name] = one, other

    def add_max(self, name: str, value: Value) -> None:
        """Add a value whose maximum over the ranks is logged; `<name>@rank` tells which rank has it."""
        one, other = value, self._maxima.get(name, -math.inf)
        if isinstance(other, Tensor):
            one, other = other, one
        self._maxima[name] = one.detach().double().clamp(min=other) if isinstance(one, Tensor) else max(one, other)

    def add_spread(self, name: str, value: float) -> None:
        """Log how far the largest value of a rank is above the smallest."""
        self._spreads[name] = value

    def _add(self, where: dict[str, Value], name: str, value: Value, spread: Spread) -> None:
        if isinstance(value, Tensor):
            value = value.detach().double()
        if spread is REPLICATED and self.world.ring.rank != 0:
            value = 0.0
        where[name] = where[name] + value if name in where else value

    def reduce(self) -> dict[str, float]:
        """Gather all ranks' values in one collective, and add them up in the order of the ranks."""
        names = (*self._sums, *self._counts, *self._maxima, *self._spreads, *self._differences)
        signature = float(zlib.crc32("\n".join(names).encode()))
        values: tuple[Mapping[str, Value], ...] = (self._sums, self._counts, self._maxima, self._spreads)
        own_values = _on_host([signature, *(value for each in values for value in each.values())])
        gathered = _gather(own_values.to(self.device), self.world)
        assert (gathered[:, 0] == signature).all(), "ranks have metered different names"
        _, sums, counts, maxima, spreads = gathered.split([1, *(len(each) for each in values)], dim=1)
        means = self._means(sums.sum(0).tolist(), counts.sum(0).tolist())
        apart_by = (spreads.amax(0) - spreads.amin(0)).tolist()
        apart = {name: means[one] - means[other]
                 for name, (one, other) in self._differences.items() if one in means and other in means}  # fmt: skip
        return means | apart | dict(zip(self._spreads, apart_by, strict=True)) | self._largest(maxima)

    def _means(self, sums: list[float], counts: list[float]) -> dict[str, float]:
        count_of = dict(zip(self._counts, counts, strict=True))
        values = {}
        for name, total in zip(self._sums, sums, strict=True):
            if name not in count_of:
                values[name] = total
            elif count_of[name]:
                values[name] = total / count_of[name]
        return values

    def _largest(self, columns: Tensor) -> dict[str, float]:
        values: dict[str, float] = {}
        for number, name in enumerate(self._maxima):
            rank = int(columns[:, number].argmax())
            if columns[rank, number] > -math.inf:  # -inf: no rank added a value
                values[name], values[f"{name}@rank"] = float(columns[rank, number]), rank
        return values


def _on_host(values: Sequence[Value]) -> Tensor:
    """Return the values in float64, by one copy from the device."""
    computed = [value for value in values if isinstance(value, Tensor)]
    known = iter(torch.stack(computed).tolist() if computed else [])
    return torch.tensor([next(known) if isinstance(value, Tensor) else value for value in values], dtype=torch.float64)


def _gather(own_values: Tensor, world: World) -> Tensor:
    if world.size == 1:
        return own_values.unsqueeze(0).cpu()
    gathered = [torch.empty_like(own_values) for _ in range(world.size)]
    dist.all_gather(gathered, own_values)
    return torch.stack(gathered).cpu()


class Stopwatch:
    """How long a device takes for a part of a step: by events on a GPU, whose host runs ahead, else by the clock."""

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self._mark = mark_on_gpu if device.type == "cuda" else clock or time.monotonic
        self._began = self._ended = self._mark()

    def stop(self) -> None:
        self._ended = self._mark()

    def seconds(self) -> float:
        """Return the seconds until it was stopped last, once the device has come so far."""
        if isinstance(self._began, float):
            return float(self._ended - self._began)
        return float(self._began.elapsed_time(self._ended)) / 1000


def mark_on_gpu() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Computing(Watcher):
    """How long a rank computes, and does not wait for the others of its ring: while it looks on at the ring's traffic.

    On a CPU that is the processor's time, also where ranks take turns; other threads of the rank count.
    """

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic
        self._all, self._waits = self._stopwatch(), list[Stopwatch]()
        traffic.watcher = self

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self._device, time.process_time)

    def awaits(self) -> None:
        self._waits.append(self._stopwatch())

    def awaited(self, ticket: float) -> None:  # noqa: ARG002
        self._waits[-1].stop()

    def stop(self) -> None:
        """Look on no longer. What is computed from now on does not count."""
        if self._traffic.watcher is self:
            self._all.stop()
            self._traffic.watcher = None

    def seconds(self) -> float:
        """Return the seconds until it was stopped. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self._all.seconds() - sum(each.seconds() for each in self._waits)
