"""Hybrid: Ulysses among ranks that are near each other, and zigzag around those groups.

    ring 8, ulysses_size 2   chunk  0 1 2 3 4 5 6 7     heads computed  0 1 2 3 | 4 5 6 7
                             ranks  0 2 4 6 6 4 2 0     by rank            0         1
                                    1 3 5 7 7 5 3 1                        2         3 …

Heads are exchanged inside a group, where links are fast. Keys and values of some of the heads travel from group to
group while the current ones are attended to. So a ring may be larger than the number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlexp.training.ring.layouts.ulysses import Ulysses


@dataclass(frozen=True)
class Hybrid(Ulysses):
    ulysses_size: int
    name = "hybrid"

    def shared(self, ring_size: int) -> int:
        """A ring of one, as tests and the probe use it, has no groups."""
        return self.ulysses_size if ring_size % self.ulysses_size == 0 else 1
