"""Select rows of a shard: by a slice, which is a view, where they lie together, else by an index."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlexp.training.types import moved

Ranges = tuple[range, ...]
Rows = slice | Tensor
Lengths = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows by segment of a kernel's call."""

    segments: tuple[Ranges, ...]
    on_device: Tensor | None = None  # the index, once it has been moved

    @cached_property
    def lengths(self) -> Lengths:
        return tuple(map(count, self.segments))

    @cached_property
    def index(self) -> Rows:
        if self.on_device is not None:
            return self.on_device
        filled = [each for ranges in self.segments for each in ranges if each]
        if all(before.stop == after.start for before, after in itertools.pairwise(filled)):
            return slice(filled[0].start, filled[-1].stop) if filled else slice(0, 0)
        return in_turn(filled)

    @property
    def count(self) -> int:
        return sum(self.lengths)

    def to(self, device: torch.device) -> Selection:
        return self if isinstance(self.index, slice) else Selection(self.segments, moved(self.index, device))


def count(ranges: Iterable[range]) -> int:
    return sum(map(len, ranges))


def in_turn(ranges: Iterable[range]) -> Tensor:
    """Return the numbers of ranges, one range after the other."""
    numbers = [np.arange(each.start, each.stop) for each in ranges]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))


def disjoint(ranges: Iterable[range]) -> bool:
    """Say whether no number stands in two ranges, none of which is empty."""
    ordered = sorted(ranges, key=lambda each: each.start)
    return all(one.stop <= other.start for one, other in itertools.pairwise(ordered))


def joined(ranges: Iterable[range]) -> Ranges:
    """Return the union of ranges: in ascending order, and apart from each other."""
    union: list[range] = []
    for each in sorted(filter(None, ranges), key=lambda each: each.start):
        if union and each.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(union[-1].stop, each.stop))
        else:
            union.append(each)
    return tuple(union)


def pieces(ranges: Ranges, size: int) -> list[Ranges]:
    """Cut ranges that lie one after the other into pieces of this size."""
    cut: list[list[range]] = [[] for _ in range(count(ranges) // size)]
    for each, begin in in_a_row(ranges):
        for number in range(begin // size, -(-(begin + len(each)) // size)):
            first, end = (max(0, min(bound - begin, len(each))) for bound in (number * size, (number + 1) * size))
            cut[number].append(each[first:end])
    return [*map(tuple, cut)]


def where(lying: Iterable[tuple[range, int]]) -> Callable[[range], range]:
    """Return where rows are, in a function: of each range of them is given where it begins."""
    moves = sorted((rows.start, begin - rows.start) for rows, begin in lying)
    starts = [start for start, _ in moves]

    def place(rows: range) -> range:
        first = rows.start + moves[bisect_right(starts, rows.start) - 1][1]
        return range(first, first + len(rows))

    return place


def in_a_row(ranges: Ranges, begin: int = 0) -> list[tuple[range, int]]:
    """Let ranges lie one after the other: return where each begins."""
    return [*zip(ranges, itertools.accumulate(map(len, ranges), initial=begin), strict=False)]


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
