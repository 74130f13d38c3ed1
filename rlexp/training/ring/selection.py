"""Select rows of a shard: by a slice, which is a view, where they lie together, else by an index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Rows
from rlexp.training.types import moved


@dataclass(frozen=True)
class Selection:
    """Rows of a shard, and how many of them belong to each segment of a kernel's call."""

    index: Rows
    lengths: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.lengths)

    def to(self, device: torch.device) -> Selection:
        return replace(self, index=moved(self.index, device)) if isinstance(self.index, Tensor) else self


def in_turn(ranges: Iterable[range]) -> Tensor:
    """Return the numbers of ranges, one range after the other."""
    numbers = [np.arange(each.start, each.stop) for each in ranges]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))


def selection(segments: Iterable[Iterable[range]]) -> Selection:
    """Select rows segment by segment."""
    of_segments = [tuple(ranges) for ranges in segments]
    lengths = tuple(sum(map(len, ranges)) for ranges in of_segments)
    filled = [each for ranges in of_segments for each in ranges if each]
    if not filled:
        return Selection(slice(0, 0), lengths)
    if all(before.stop == after.start for before, after in itertools.pairwise(filled)):
        return Selection(slice(filled[0].start, filled[-1].stop), lengths)
    return Selection(in_turn(filled), lengths)


def joined(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the union of ranges: in ascending order, and apart from each other."""
    union: list[range] = []
    for each in sorted(filter(None, ranges), key=lambda each: each.start):
        if union and each.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(union[-1].stop, each.stop))
        else:
            union.append(each)
    return tuple(union)


def within(rows: Rows, those: Rows) -> Rows:
    """Return where rows are that were taken from rows: `those` of them."""
    if isinstance(rows, slice):
        first = rows.start or 0
        return slice(those.start + first, those.stop + first) if isinstance(those, slice) else those + first
    return rows[those]


def select(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put(into: Tensor, rows: Rows, values: Tensor) -> None:
    """Write values into rows that are all different."""
    if isinstance(rows, slice):
        into[rows] = values
    else:
        into.index_copy_(0, rows, values.to(into.dtype))


def covers(rows: Rows, count: int) -> bool:
    """Say whether these are all rows of a tensor with so many, in their order."""
    return isinstance(rows, slice) and rows == slice(0, count)
