"""The world as replicas × ring: rank = replica * ring_size + place in the ring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Traffic:
    """Bytes that this rank has sent around its ring."""

    sent: int = 0


@dataclass(frozen=True)
class Ring:
    """One replica's ring. `ranks` are global, in ring order; `group` is None for a ring of one."""

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def next_rank(self) -> int:
        return self.ranks[(self.rank + 1) % self.size]

    @property
    def previous_rank(self) -> int:
        return self.ranks[(self.rank - 1) % self.size]


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


def build_world(ring_size: int) -> World:
    """Create the ring groups; every rank creates all of them, in the same order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size % ring_size == 0, (size, ring_size)
    mine = None
    for first in range(0, size, ring_size):
        ranks = tuple(range(first, first + ring_size))
        group = dist.new_group(list(ranks)) if ring_size > 1 else None
        if rank in ranks:
            mine = Ring(rank - first, ranks, group)
    assert mine is not None
    return World(rank, size, mine)
