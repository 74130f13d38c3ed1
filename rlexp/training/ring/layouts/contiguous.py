"""Contiguous: a segment is cut into as many chunks as the ring has ranks, and rank r holds chunk r.

The last rank attends to everything and the first to itself alone, so half of the ring's time is spent waiting. It
serves as a comparison:

    ring 4   chunk  0 1 2 3
             rank   0 1 2 3
"""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.training.ring.base import ALL
from rlexp.training.ring.cut import Cut, cut
from rlexp.training.ring.rotation import Block, Rotating
from rlexp.training.types import Segment


class Contiguous(Rotating):
    name = "contiguous"

    def cut(self, segments: Sequence[Segment], ring_size: int) -> Cut:
        return cut(segments, range(ring_size))

    def block(self, rank: int, source: int, ring_size: int) -> Block | None:  # noqa: ARG002
        if source > rank:
            return None
        return Block(ALL, ALL, causal=source == rank)
