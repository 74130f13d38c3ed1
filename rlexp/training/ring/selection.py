"""Select the tokens of a block from a rank's shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.base import ALL, EARLY, LATE, Part
from rlexp.training.ring.cut import Cut
from rlexp.training.ring.kernels.base import Rows
from rlexp.training.types import moved


@dataclass(frozen=True)
class Selection:
    """Real tokens of a shard, and how many of them belong to each segment."""

    index: Rows
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Selection:
        return replace(self, index=moved(self.index, device)) if isinstance(self.index, Tensor) else self


def parts_of(cut: Cut, rank: int) -> dict[Part, Selection]:
    """Select each part of the rank's shard. Padding belongs to no part, so attention never computes it."""
    held = cut.held(rank)  # a rank holds its first chunk of every segment, then its last
    early, late = held[0], held[-1]
    whole = [(*chunks,) for chunks in zip(*held, strict=True)]
    return {
        ALL: selection(whole),
        EARLY: selection([(each,) for each in early]),
        LATE: selection([(each,) for each in late]),
    }


def selection(segments: Sequence[tuple[range, ...]]) -> Selection:
    """Select tokens segment by segment: by a slice (a view, no copy) where they are contiguous, else by an index."""
    lengths = tuple(sum(len(each) for each in ranges) for ranges in segments)
    filled = [each for ranges in segments for each in ranges if len(each)]
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
        into[rows].add_(added)
    else:
        into.index_add_(0, rows, added.to(into.dtype))
