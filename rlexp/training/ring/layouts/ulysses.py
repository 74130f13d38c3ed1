"""Ulysses: each rank holds a piece of the pack, and for attention it receives all tokens of some heads.

    ring 4   tokens held  0 1 2 3     heads computed  0 1 | 2 3 | 4 5 | 6 7
             by rank      0 1 2 3     by rank          0     1     2     3

Attention itself is then as on one device: one call of the kernel, no merging, and the same work on every rank.

Hybrid: Ulysses among ranks that are near each other, and zigzag around those groups.

    ring 8, ulysses_size 2   chunk  0 1 2 3 4 5 6 7     heads computed  0 1 2 3 | 4 5 6 7
                             ranks  0 2 4 6 6 4 2 0     by rank            0         1
                                    1 3 5 7 7 5 3 1                        2         3 …

Heads are exchanged inside a group, where links are fast. Keys and values of some of the heads travel from group to
group while the current ones are attended to. So a ring may be larger than the number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlexp.training.ring.base import Layout, Window
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.layouts.ringwise import Ringwise
from rlexp.training.ring.placement import Placement
from rlexp.training.ring.selection import count, pieces
from rlexp.training.ring.transports.heads import HeadsPlan
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring


@dataclass(frozen=True)
class Ulysses(Layout):
    name: str
    around: Ringwise  # among the ranks that compute the same heads
    ulysses_size: int | None = None  # ranks that share out the heads; None: all

    def shared(self, ring_size: int) -> int:
        """Return how many ranks share out the heads. A ring of one, as tests and the probe use it, has no groups."""
        inner = self.ulysses_size or ring_size
        return inner if ring_size % inner == 0 else 1

    def place(self, segments: Sequence[Segment], ring_size: int) -> Placement:
        """Cut the piece of each rank of the outer ring once more, among the ranks that share out its heads."""
        inner = self.shared(ring_size)
        outer = self.around.place(segments, ring_size // inner)
        share = count(outer.runs[0]) // inner
        real = [min(max(real - piece * share, 0), share) for real in outer.real for piece in range(inner)]
        return Placement(tuple(piece for runs in outer.runs for piece in pieces(runs, share)), tuple(real))

    def work(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> tuple[float, ...]:
        inner = self.shared(ring_size)
        outer = self.around.work(segments, ring_size // inner, window)
        return tuple(work / inner for work in outer for _ in range(inner))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None) -> HeadsPlan:
        inner, outer = ring.split(self.shared(ring.size))
        return HeadsPlan(inner, self.around.plan(segments, outer, kernel, window))
