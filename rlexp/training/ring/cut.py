"""Cut a pack evenly among the ranks of a ring, so that only the pack as a whole needs padding.

Every segment is cut into chunks of one size. The remainder is dealt out, one token to a chunk, to the ranks that hold
the fewest tokens; among those, to the ones with the least attention to compute. So the numbers of tokens that the ranks
hold differ by one at most, whatever the lengths of the segments, and padding is less than a token per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from rlexp.training.ring.base import Deal
from rlexp.training.types import Segment


@dataclass(frozen=True)
class Cut:
    """The chunks that each rank holds of each segment: ranges of positions of the segment, in ascending order."""

    segments: tuple[Segment, ...]
    chunks: tuple[tuple[tuple[range, ...], ...], ...]

    @property
    def ring_size(self) -> int:
        return len(self.chunks)

    def real(self, rank: int) -> int:
        return sum(len(chunk) for chunk in chain.from_iterable(self.chunks[rank]))

    def work(self, rank: int) -> int:
        """Count the pairs of a query of this rank and a key that it sees."""
        return sum(seen(chunk) for chunk in chain.from_iterable(self.chunks[rank]))

    def places(self) -> tuple[Tensor, ...]:
        """Return by rank the places in the pack that it holds, in order.

        First come its first chunks of all segments, then its last chunks, so that each of the two is contiguous, and
        then its share of padding. Each place of the padding goes to one rank.
        """
        share = sum(segment.padded for segment in self.segments) // self.ring_size
        padding = iter(place for s in self.segments for place in range(s.start + s.length, s.start + s.padded))
        held = []
        for rank in range(self.ring_size):
            real = [
                torch.arange(segment.start + chunk.start, segment.start + chunk.stop)
                for chunks in zip(*self.chunks[rank], strict=True)
                for segment, chunk in zip(self.segments, chunks, strict=True)
            ]
            rest = [next(padding) for _ in range(share - self.real(rank))]
            held.append(torch.cat([*real, torch.tensor(rest, dtype=torch.int64)]))
        return tuple(held)

    def held(self, rank: int) -> list[list[range]]:
        """Return where the rank holds its chunks among its tokens: by place in the segment, then by segment."""
        held, start = [], 0
        for chunks in zip(*self.chunks[rank], strict=True):
            stops = [*accumulate((len(chunk) for chunk in chunks), initial=start)]
            held.append([range(*pair) for pair in pairwise(stops)])
            start = stops[-1]
        return held

    def deal(self) -> Deal:
        """Deal for layouts in which each rank attends with its own queries, all heads."""
        ranks = range(self.ring_size)
        return Deal(self.places(), tuple(map(self.real, ranks)), tuple(float(self.work(rank)) for rank in ranks))


def seen(chunk: range) -> int:
    """Count the keys that the queries at these positions see, each itself included."""
    return (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2


def cut(segments: Sequence[Segment], owners: Sequence[int]) -> Cut:
    """Cut each segment into as many chunks as `owners` has entries: for each chunk, the rank that holds it.

    Every rank holds equally many chunks of a segment, one or two.
    """
    ranks = max(owners) + 1
    total = sum(segment.padded for segment in segments)
    assert total % ranks == 0, (total, ranks)
    tokens, work = [0] * ranks, [0] * ranks
    chunks: list[list[tuple[range, ...]]] = [[] for _ in range(ranks)]
    for segment in segments:
        sizes = _sizes(segment.length, owners, tokens, work)
        bounds = [*accumulate(sizes, initial=0)]
        held: list[list[range]] = [[] for _ in range(ranks)]
        for owner, (start, stop) in zip(owners, pairwise(bounds), strict=True):
            held[owner].append(range(start, stop))
        for rank, mine in enumerate(held):
            chunks[rank].append(tuple(mine))
            tokens[rank] += sum(len(chunk) for chunk in mine)
            work[rank] += sum(seen(chunk) for chunk in mine)
    return Cut(tuple(segments), tuple(tuple(of_rank) for of_rank in chunks))


def _sizes(length: int, owners: Sequence[int], tokens: Sequence[int], work: Sequence[int]) -> list[int]:
    """Return the sizes of a segment's chunks: equal, but for the tokens of the remainder, which are dealt out."""
    base, left = divmod(length, len(owners))
    sizes = [base] * len(owners)
    if not left:
        return sizes
    ranks = sorted(range(len(tokens)), key=lambda rank: (work[rank], rank))
    fewest = min(tokens)
    # Ranks hold `fewest` tokens or one more, so after the first round all hold equally many.
    turns = [[rank for rank in ranks if tokens[rank] == fewest], ranks, ranks]
    free = [[chunk for chunk, owner in enumerate(owners) if owner == rank] for rank in range(len(tokens))]
    # The work that each rank should have when all tokens are dealt out. A token sees as many keys as precede it.
    aim = sum(work) / len(work) + left * length / 2 / len(work)
    for rank in chain.from_iterable(turns):
        if not left:
            break
        if free[rank]:
            chunk = min(free[rank], key=lambda chunk: abs(work[rank] + (chunk + 1) * length / len(owners) - aim))
            free[rank].remove(chunk)
            sizes[chunk] += 1
            left -= 1
    return sizes
