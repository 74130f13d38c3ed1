"""The world as replicas × ring: rank = replica · ring_size + place in the ring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch.distributed as dist

from rlexp.launch.watch import FOR_EVER


class Watcher(Protocol):
    """Someone who wants to know when bytes leave this rank, and when this rank waits for what arrives meanwhile."""

    def leaving(self, size: int) -> float:  # noqa: ARG002
        """Return a ticket for the bytes that leave."""
        return 0.0

    def awaits(self) -> None:
        """This rank begins to wait."""
        return

    def awaited(self, ticket: float) -> None:  # noqa: ARG002
        """It has waited until the bytes of the ticket are exchanged."""
        return


@dataclass
class Traffic:
    """Bytes that this rank has sent around its ring."""

    sent: int = 0
    watcher: Watcher | None = None

    def send(self, size: int) -> float:
        """Count bytes that are sent from now on. Return a ticket for `waiting`."""
        self.sent += size
        return self.watcher.leaving(size) if self.watcher is not None else 0.0

    @contextlib.contextmanager
    def waiting(self, ticket: float = 0.0) -> Iterator[None]:
        """Note that this rank waits meanwhile, until the bytes of the ticket are exchanged."""
        watcher = self.watcher
        if watcher is not None:
            watcher.awaits()
        yield
        if watcher is not None:
            watcher.awaited(ticket)


@dataclass(frozen=True)
class Ring:
    """One replica's ring. `ranks` are global, in ring order; `group` is None for a ring of one.

    A ring may be split into inner and outer rings: place = place in the outer ring · inner size + place in the inner
    ring. `inner` and `outer` are the two that this rank belongs to.
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

    def split(self, size: int) -> tuple[Ring, Ring]:
        """Return this rank's inner ring, of `size` neighbours, and its outer ring, of one rank per inner ring."""
        if self.inner is not None and self.outer is not None and self.inner.size == size:
            return self.inner, self.outer
        inner, outer = (tuple(self.ranks[place] for place in places) for places in split(self.rank, self.size, size))
        whole = {self.size: self.group}  # any other has no group: it is a ring of one, or nothing is sent over it
        return (
            Ring(self.rank % size, inner, whole.get(len(inner)), self.traffic),
            Ring(self.rank // size, outer, whole.get(len(outer)), self.traffic),
        )


def split(rank: int, ring_size: int, size: int) -> tuple[range, range]:
    """Return the places in the ring of the inner and of the outer ring of `rank`."""
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


def build_world(ring_size: int, inner_size: int = 1) -> World:
    """Create the ring groups; every rank creates all of them, in the same order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size % ring_size == 0, (size, ring_size)

    def group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), timeout=FOR_EVER) if len(ranks) > 1 else None

    own_ring = None
    for first in range(0, size, ring_size):
        ranks = tuple(range(first, first + ring_size))
        ring = Ring(rank - first, ranks, group(ranks))
        if 1 < inner_size < ring_size:
            ring = _split(ring, inner_size, group)
        if rank in ranks:
            own_ring = ring
    assert own_ring is not None
    return World(rank, size, own_ring)


def _split(ring: Ring, size: int, group: Callable[[tuple[int, ...]], dist.ProcessGroup | None]) -> Ring:
    """Create the groups of all inner and outer rings, and return the ring with those that this rank belongs to."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for place in range(ring.size):
        for places in split(place, ring.size, size):
            ranks = tuple(ring.ranks[each] for each in places)
            if ranks not in groups:
                groups[ranks] = group(ranks)
    if ring.rank not in range(ring.size):
        return ring
    inner, outer = ring.split(size)
    inner, outer = (replace(each, group=groups[each.ranks]) for each in (inner, outer))
    return replace(ring, inner=inner, outer=outer)
