"""Zigzag: a segment is cut into 2 × ring chunks, and rank r holds the chunks r and 2·ring − 1 − r.

Every rank has an early and a late piece, so every rank has the same work at every step of the ring:

    ring 4   chunk  0 1 2 3 4 5 6 7
             rank   0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.training.ring.base import ALL, EARLY, LATE
from rlexp.training.ring.cut import Cut, cut
from rlexp.training.ring.rotation import Block, Rotating
from rlexp.training.types import Segment


def zigzag(segments: Sequence[Segment], ring_size: int) -> Cut:
    there = range(ring_size)
    return cut(segments, [*there, *reversed(there)] if ring_size > 1 else [0])


class Zigzag(Rotating):
    name = "zigzag"

    def cut(self, segments: Sequence[Segment], ring_size: int) -> Cut:
        return zigzag(segments, ring_size)

    def block(self, rank: int, source: int, ring_size: int) -> Block | None:  # noqa: ARG002
        if source == rank:
            return Block(ALL, ALL, causal=True)
        if source < rank:  # its early chunk precedes both of ours, its late chunk follows both
            return Block(ALL, EARLY, causal=False)
        return Block(LATE, ALL, causal=False)  # both of its chunks lie between our early and our late one
