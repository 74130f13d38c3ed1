"""Exchange Python objects between ranks: few and small, such as names, counts and errors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(mine: T, size: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in the order of the group's ranks, on each of its `size` ranks. A collective call."""
    if size == 1:
        return [mine]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, mine, group=group)
    return parts


def from_rank0(value: T, size: int) -> T:
    """Return rank 0's object on every rank of the world. A collective call."""
    values = [value]
    if size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]
