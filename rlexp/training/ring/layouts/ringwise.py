"""Layouts in which each rank attends with its own queries, all heads: a placement and a transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlexp.training.ring.base import Deal, Layout, Window
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.meetings import Planner
from rlexp.training.ring.placement import Chunk, Placement, placed, work_of
from rlexp.training.ring.plan import RingPlan, plan_of
from rlexp.training.ring.slices import slices_of
from rlexp.training.ring.transports.base import Transport
from rlexp.training.ring.transports.travel import direct
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

Chunks = Sequence[Sequence[Chunk]]  # of each segment
Place = Callable[[Sequence[Segment], int], Chunks]  # among so many ranks
Travel = Callable[[Planner, Ring], Transport]
SHARES, REST = 3, 1 / 4  # up to there few bytes are sent, also between nodes: docs/measured/layouts.md


@dataclass(frozen=True)
class Ringwise(Layout):
    name: str
    place: Place
    travel: Travel
    of_windows: Travel | None = None  # in layers with a short window; None: as in others

    def deal(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> Deal:
        chunks, placement = _placed(self.place, tuple(segments), ring_size)
        work = map(float, work_of(segments, chunks, ring_size, window))
        return Deal(placement.places(), tuple(map(placement.real, range(ring_size))), tuple(work))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None) -> RingPlan:
        _, placement = _placed(self.place, tuple(segments), ring.size)
        planner = Planner(slices_of(segments, window), placement)
        short = window is not None and is_short(window, [each.length for each in segments], ring.size)
        travel = (self.of_windows if short else None) or self.travel
        return plan_of(planner, ring, kernel, travel if ring.size > 1 else direct)


def is_short(window: int, lengths: Sequence[int], ring_size: int) -> bool:
    """Say whether a window reaches over at most SHARES ranks' shares of a segment, but for a REST of the tokens."""
    return sum(length for length in lengths if window * ring_size > SHARES * length) <= REST * sum(lengths)


@functools.lru_cache(maxsize=1)  # a pack is dealt and planned for each kind of layers
def _placed(place: Place, segments: tuple[Segment, ...], ring_size: int) -> tuple[Chunks, Placement]:
    chunks = place(segments, ring_size)
    return chunks, placed(segments, chunks, ring_size)
