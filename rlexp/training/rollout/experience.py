"""A rollout's samples: each is in the host memory of one rank, and a table of numbers about all is on every rank.

They meet in a process group in which a rank may wait as long as it likes. One rank may still draw long answers, or wait
for a slow reward, when the others are done. That is no hanging collective: each token counts as progress, and so does
the wait for a reward. A rank that dies closes its connections and is noticed at once.

Shape letters: N samples of a rollout, or trained tokens of a pack; n those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch import watch
from rlexp.training.dealer.packing import parted
from rlexp.training.types import Floats, Pack, Sample, Shard
from rlexp.training.world.groups import World
from rlexp.training.world.objects import gather_objects

T = TypeVar("T")
S = TypeVar("S", bound=Sample)
Table = dict[str, Tensor]  # columns by name, each (N,) in float64, in the order of the samples' places


@dataclass(frozen=True)
class Host:
    """`group` is a gloo group, whatever device the ranks compute on; None if there is one rank."""

    size: int
    group: Any | None

    def meet(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1))

    def sum(self, numbers: Tensor) -> None:
        """Sum over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
            watch.note()

    def gathered(self, own: T) -> list[T]:
        """Return every rank's object, on every rank."""
        return gather_objects(own, self.size, self.group)


def build_host(world: World) -> Host:
    """Build the group. A collective call of all ranks."""
    several = world.size > 1
    return Host(world.size, dist.new_group(backend="gloo", timeout=watch.FOR_EVER) if several else None)


def table_of(
    samples: Sequence[S], total: int, host: Host, row_of: Callable[[S], Mapping[str, float]], names: Sequence[str]
) -> Table:
    """Return the table of `row_of` for all samples, on every rank.

    Each place belongs to exactly one rank, so the sum over the ranks is exact.
    """
    numbers = torch.zeros(len(names) + 1, total, dtype=torch.float64)
    for sample in samples:
        row = row_of(sample)
        numbers[:, sample.place] = torch.tensor([*(row[name] for name in names), 1.0], dtype=torch.float64)
    host.sum(numbers)
    assert bool((numbers[-1] == 1).all()), "a sample has no rank, or several"
    return dict(zip(names, numbers[:-1], strict=True))


def fetch(local: Sequence[S], places: Sequence[int], host: Host) -> list[S]:
    """Return the samples at these places, in this order, on every rank. A collective call."""
    wanted = set(places)
    parts = host.gathered([sample for sample in local if sample.place in wanted])
    by_place = {sample.place: sample for part in parts for sample in part}
    return [by_place[place] for place in places]


def off_pack(pack: Pack, shard: Shard, values_n: Tensor) -> list[Floats]:
    """Return the values of each sequence's trained tokens, from all ranks'. A collective call of the ring."""
    values_N = torch.zeros(len(pack.place_N), dtype=values_n.dtype, device=values_n.device)
    values_N[shard.listed_n] = values_n
    if shard.ring.size > 1:
        dist.all_reduce(values_N, group=shard.ring.group)
    return parted(pack, values_N.cpu())
