"""Process group for data in the host's memory, in which a rank may wait as long as it likes.

One rank may still draw long answers, or wait for a slow reward, when the others are done. That is no hanging
collective: each token counts as progress, and so does the wait for a reward. A rank that dies closes its connections
and is noticed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch import watch
from rlexp.training.world.groups import World
from rlexp.training.world.objects import gather_objects

T = TypeVar("T")


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
