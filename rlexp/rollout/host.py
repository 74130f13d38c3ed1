"""Where ranks meet over what lies in the host's memory: a group of its own, with patience.

One rank's answers may be long, or its reward slow, while the others are done: that is no collective that hangs, so
`launch.timeout_seconds` is not its measure. A rank that dies closes its connections, and is noticed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.ring.groups import World
from rlexp.ring.objects import gather_objects
from rlexp.rollout.bridge import PATIENCE

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """`group` is gloo's, whatever the ranks compute on; None for a rank alone."""

    size: int
    group: Any | None

    def meet(self) -> None:
        """Wait for all."""
        self.sum(torch.zeros(1))

    def sum(self, numbers: Tensor) -> None:
        """Over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)

    def gathered(self, mine: T) -> list[T]:
        """Every rank's, on every rank."""
        return gather_objects(mine, self.size, self.group)


def build_host(world: World) -> Host:
    """A collective call of all ranks."""
    several = world.size > 1
    return Host(world.size, dist.new_group(backend="gloo", timeout=PATIENCE) if several else None)
