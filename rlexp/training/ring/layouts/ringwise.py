"""Layouts in which each rank attends with its own queries, all heads: a placement and a transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlexp.training.ring.base import Layout, Window
from rlexp.training.ring.calls import Step, sharing
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.placement import Placement, placed, work_of
from rlexp.training.ring.plan import RingPlan
from rlexp.training.ring.slices import Slice, slices_of
from rlexp.training.ring.transports.base import Transport
from rlexp.training.ring.transports.travel import direct
from rlexp.training.ring.widths import Costs, Deal, chunks_of, deal
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

Cut = Callable[[Sequence[Segment], int], Placement]  # among so many ranks
Way = Callable[[Sequence[Slice], Placement, Ring], tuple[Transport, list[Step]]]
SHARES, REST = 3, 1 / 4  # up to there few bytes are sent, also between nodes: docs/measured/layouts.md


@dataclass(frozen=True)
class Ringwise(Layout):
    name: str
    cut: Cut
    way: Way
    of_windows: Way | None = None  # in layers with a short window; None: as in others
    costs: Costs | None = None

    def multiple(self, ring_size: int) -> int:
        return ring_size if self.costs is None else 1

    def spare(self, ring_size: int) -> int:
        return 0 if self.costs is None else ring_size - 1

    def place(self, segments: Sequence[Segment], ring_size: int) -> Placement:
        return _placed(self.cut, self.costs, tuple(segments), ring_size)

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal | None:
        return None if self.costs is None else _dealt(self.costs, tuple(segments), ring_size)

    def with_room(self, tokens: int) -> Ringwise:
        return self if self.costs is None else replace(self, costs=replace(self.costs, most=tokens))

    def work(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> tuple[float, ...]:
        return tuple(map(float, work_of(segments, self.place(segments, ring_size), window)))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None) -> RingPlan:
        short = window is not None and is_short(window, [each.length for each in segments], ring.size)
        way = direct if ring.size == 1 else (self.of_windows if short else None) or self.way
        transport, steps = way(slices_of(segments, window), self.place(segments, ring.size), ring)
        return RingPlan(kernel, transport, *sharing(steps))


def is_short(window: int, lengths: Sequence[int], ring_size: int) -> bool:
    """Say whether a window reaches over at most SHARES ranks' shares of a segment, but for a REST of the tokens."""
    return sum(length for length in lengths if window * ring_size > SHARES * length) <= REST * sum(lengths)


@functools.lru_cache(maxsize=1)  # a pack is placed and planned for each kind of layers
def _placed(cut: Cut, costs: Costs | None, segments: tuple[Segment, ...], ring_size: int) -> Placement:
    if costs is None or ring_size == 1:
        return cut(segments, ring_size)
    parts = _dealt(costs, segments, ring_size).parts
    return placed(segments, [*map(chunks_of, segments, parts)], ring_size)


@functools.lru_cache(maxsize=1)
def _dealt(costs: Costs, segments: tuple[Segment, ...], ring_size: int) -> Deal:
    return deal(segments, ring_size, costs)
