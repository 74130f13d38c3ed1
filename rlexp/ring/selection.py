"""Where in a rank's shard the tokens lie that a block is computed of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.ring.cut import Cut
from rlexp.ring.layout import ALL, EARLY, LATE, Part


@dataclass(frozen=True)
class Selection:
    """Real tokens of a shard, and how many of them each segment has."""

    index: slice | Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> Selection:
        return replace(self, index=self.index.to(device)) if isinstance(self.index, Tensor) else self


def parts_of(found: Cut, rank: int) -> dict[Part, Selection]:
    """Padding is left out of every part: it costs attention nothing."""
    ranges: dict[Part, list[range]] = {ALL: [], EARLY: [], LATE: []}
    start = 0
    for chunks in found.chunks[rank]:
        stop = start + sum(len(chunk) for chunk in chunks)
        ranges[ALL].append(range(start, stop))
        ranges[EARLY].append(range(start, start + len(chunks[0])))
        ranges[LATE].append(range(stop - len(chunks[-1]), stop))
        start = stop
    return {part: selection(found) for part, found in ranges.items()}


def selection(ranges: Sequence[range]) -> Selection:
    """A slice (a view, no copy) where the tokens are contiguous, otherwise an index."""
    lengths = tuple(len(found) for found in ranges)
    filled = [found for found in ranges if len(found)]
    if not filled:
        return Selection(slice(0, 0), lengths)
    if all(before.stop == after.start for before, after in itertools.pairwise(filled)):
        return Selection(slice(filled[0].start, filled[-1].stop), lengths)
    return Selection(torch.cat([torch.arange(found.start, found.stop) for found in filled]), lengths)
