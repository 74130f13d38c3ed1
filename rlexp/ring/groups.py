"""The world as replicas × ring: rank = replica * ring_size + place in the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist


@dataclass
class Traffic:
    """Bytes that this rank has sent around its ring."""

    sent: int = 0


@dataclass(frozen=True)
class Ring:
    """One replica's ring. `ranks` are global, in ring order; `group` is None for a ring of one.

    A ring may be split in two ways at once: rank = outer · inner size + inner. `inner` and `outer` are this rank's.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    inner: Ring | None = None
    outer: Ring | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def next_rank(self) -> int:
        return self.ranks[(self.rank + 1) % self.size]

    @property
    def previous_rank(self) -> int:
        return self.ranks[(self.rank - 1) % self.size]

    def split(self, size: int) -> tuple[Ring, Ring]:
        """Into neighbours, `size` of them, and those that stand where we stand among their neighbours."""
        if self.inner is not None and self.outer is not None and self.inner.size == size:
            return self.inner, self.outer
        inner, outer = (tuple(self.ranks[place] for place in places) for places in split(self.rank, self.size, size))
        whole = {self.size: self.group}  # elsewhere there is no group: a ring of one, or one that is looked at only
        return (
            Ring(self.rank % size, inner, whole.get(len(inner)), self.traffic),
            Ring(self.rank // size, outer, whole.get(len(outer)), self.traffic),
        )


def split(rank: int, ring_size: int, size: int) -> tuple[range, range]:
    """The places in the ring of the neighbours of `rank`, and of those that it meets around them."""
    assert ring_size % size == 0, (ring_size, size)
    first = rank // size * size
    return range(first, first + size), range(rank % size, ring_size, size)


ALONE = Ring(0, (0,))


@dataclass(frozen=True)
class World:
    """This rank's place: which replica it belongs to, and where in that replica's ring it stands."""

    rank: int
    size: int
    ring: Ring

    @property
    def replica(self) -> int:
        return self.rank // self.ring.size

    @property
    def dp_size(self) -> int:
        return self.size // self.ring.size


def build_world(ring_size: int, timeout: timedelta | None = None, inner_size: int = 1) -> World:
    """Create the ring groups; every rank creates all of them, in the same order. A new group has not the patience of
    the one it is made of, but torch's own half an hour."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size % ring_size == 0, (size, ring_size)

    def group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None

    mine = None
    for first in range(0, size, ring_size):
        ranks = tuple(range(first, first + ring_size))
        ring = Ring(rank - first, ranks, group(ranks))
        if 1 < inner_size < ring_size:
            ring = _split(ring, inner_size, group)
        if rank in ranks:
            mine = ring
    assert mine is not None
    return World(rank, size, mine)


def _split(ring: Ring, size: int, group: Callable[[tuple[int, ...]], dist.ProcessGroup | None]) -> Ring:
    """With the groups of all its inner and outer rings."""
    found: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for place in range(ring.size):
        for places in split(place, ring.size, size):
            ranks = tuple(ring.ranks[each] for each in places)
            if ranks not in found:
                found[ranks] = group(ranks)
    if ring.rank not in range(ring.size):
        return ring
    inner, outer = ring.split(size)
    return replace(ring, inner=replace(inner, group=found[inner.ranks]), outer=replace(outer, group=found[outer.ranks]))
