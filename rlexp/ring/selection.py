"""Select the tokens of a block from a rank's shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.ring.cut import Cut
from rlexp.ring.kernels.base import Rows
from rlexp.ring.layout import ALL, EARLY, LATE, Part
from rlexp.types import moved


@dataclass(frozen=True)
class Selection:
    """Real tokens of a shard, and how many of them belong to each segment."""

    index: Rows
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Selection:
        return replace(self, index=moved(self.index, device)) if isinstance(self.index, Tensor) else self


def parts_of(cut: Cut, rank: int) -> dict[Part, Selection]:
    """Select each part of the rank's shard. Padding belongs to no part, so attention never computes it."""
    ranges: dict[Part, list[range]] = {ALL: [], EARLY: [], LATE: []}
    start = 0
    for chunks in cut.chunks[rank]:
        stop = start + sum(len(chunk) for chunk in chunks)
        ranges[ALL].append(range(start, stop))
        ranges[EARLY].append(range(start, start + len(chunks[0])))
        ranges[LATE].append(range(stop - len(chunks[-1]), stop))
        start = stop
    return {part: selection(of_segments) for part, of_segments in ranges.items()}


def selection(ranges: Sequence[range]) -> Selection:
    """Select by a slice (a view, no copy) where the tokens are contiguous, otherwise by an index."""
    lengths = tuple(len(each) for each in ranges)
    filled = [each for each in ranges if len(each)]
    if not filled:
        return Selection(slice(0, 0), lengths)
    if all(before.stop == after.start for before, after in itertools.pairwise(filled)):
        return Selection(slice(filled[0].start, filled[-1].stop), lengths)
    return Selection(torch.cat([torch.arange(each.start, each.stop) for each in filled]), lengths)


def select(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def add(into: Tensor, rows: Rows, added: Tensor) -> None:
    """Add to rows that are all different."""
    if isinstance(rows, slice):
        into[rows] += added
    else:
        into.index_add_(0, rows, added)
