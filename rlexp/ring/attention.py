"""Attention over a ring: what it needs to know of the batch, and the door to the layout that computes it.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel
from rlexp.ring.layouts import ALL, EARLY, LATE, Layout, Part
from rlexp.types import Segment


@dataclass(frozen=True)
class Selection:
    """The real tokens of a part of a rank's shard: where they lie, and how many each segment has."""

    index: slice | Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class RingBatch:
    """What attention needs to know of the batch. Travels as a keyword argument of the model's forward call."""

    ring: Ring
    layout: Layout
    kernel: BlockKernel
    parts: tuple[dict[Part, Selection], ...]  # by source rank
    max_length: int  # of any sequence of the run: windows shorter than this are refused

    def to(self, device: torch.device) -> RingBatch:
        def moved(selection: Selection) -> Selection:
            index = selection.index
            return replace(selection, index=index.to(device) if isinstance(index, Tensor) else index)

        return replace(self, parts=tuple({key: moved(part) for key, part in parts.items()} for parts in self.parts))


def ring_batch(
    segments: Sequence[Segment], ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int
) -> RingBatch:
    if any(segment.parent is not None for segment in segments):
        # The types carry the forest; a child's block over its parent is the one call that is not made yet.
        raise NotImplementedError("segments with a parent are not attended to yet")
    sources = tuple(_parts(segments, source, ring.size, layout) for source in range(ring.size))
    return RingBatch(ring, layout, kernel, sources, max_length)


def local_index(segments: Sequence[Segment], rank: int, ring_size: int, layout: Layout) -> Tensor:
    """The places in the pack of the tokens that `rank` holds, in the order in which it holds them."""
    chunks = [
        torch.arange(segment.start + chunk.start, segment.start + chunk.stop)
        for segment in segments
        for chunk in layout.chunks(segment.padded, rank, ring_size)
    ]
    return torch.cat(chunks)


def real_lengths(segment: Segment, rank: int, ring_size: int, layout: Layout) -> tuple[int, ...]:
    """Real tokens in each chunk of a rank. Padding stands at a segment's end, so they are a prefix of the chunk."""
    chunks = layout.chunks(segment.padded, rank, ring_size)
    return tuple(min(max(segment.length - chunk.start, 0), len(chunk)) for chunk in chunks)


def _parts(segments: Sequence[Segment], rank: int, ring_size: int, layout: Layout) -> dict[Part, Selection]:
    """Padding is left out of every part: it costs attention nothing."""
    ranges: dict[Part, list[range]] = {ALL: [], EARLY: [], LATE: []}
    start = 0
    for segment in segments:
        chunk = segment.padded // ring_size // len(layout.chunks(segment.padded, rank, ring_size))
        real = real_lengths(segment, rank, ring_size, layout)
        ranges[ALL].append(range(start, start + sum(real)))
        ranges[EARLY].append(range(start, start + real[0]))
        ranges[LATE].append(range(start + chunk, start + chunk + real[-1]))
        start += segment.padded // ring_size
    return {part: _selection(found) for part, found in ranges.items()}


def _selection(ranges: list[range]) -> Selection:
    """A slice (a view, no copy) where the tokens are contiguous, otherwise an index."""
    lengths = tuple(len(found) for found in ranges)
    filled = [found for found in ranges if len(found)]
    if not filled:
        return Selection(slice(0, 0), lengths)
    if all(before.stop == after.start for before, after in itertools.pairwise(filled)):
        return Selection(slice(filled[0].start, filled[-1].stop), lengths)
    return Selection(torch.cat([torch.arange(found.start, found.stop) for found in filled]), lengths)


def ring_attention(q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
    """Causal attention of each segment to itself over the whole ring; (t, H, D) in the dtype of the queries."""
    return batch.layout.attend(q_tHD, k_tGD, v_tGD, batch, scale)
