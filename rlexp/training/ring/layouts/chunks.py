"""Which rank of a ring holds which chunk of each segment.

zigzag      A segment is cut into 2 × ring chunks, and rank r holds the chunks r and 2·ring − 1 − r. So every rank has
            an early and a late piece, and the same work at every step of the ring:

                ring 4   chunk  0 1 2 3 4 5 6 7
                         rank   0 1 2 3 3 2 1 0

contiguous  A segment is cut into as many chunks as the ring has ranks, and rank r holds chunk r. The last rank attends
            to everything and the first to itself alone, so half of the ring's time is spent waiting: a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.training.ring.placement import Placement, cut
from rlexp.training.types import Segment


def zigzag(segments: Sequence[Segment], ring_size: int) -> Placement:
    ranks = range(ring_size)
    return cut(segments, [*ranks, *reversed(ranks)] if ring_size > 1 else [0])


def contiguous(segments: Sequence[Segment], ring_size: int) -> Placement:
    return cut(segments, range(ring_size))
