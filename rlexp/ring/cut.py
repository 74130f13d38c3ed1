"""How a pack is cut among the ranks of a ring: evenly, so that nothing need be padded but the pack as a whole.

Every segment is cut into chunks of one size. What does not divide is dealt out, a token a chunk, to the ranks that hold
the fewest tokens, and among those to the ones that have the least attention to compute. So the ranks hold as many
tokens, to within one, whatever the lengths of the segments are, and padding is less than a token a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from rlexp.types import Segment


@dataclass(frozen=True)
class Cut:
    """By rank and by segment the chunks that it holds: ranges of positions of the segment, in ascending order."""

    segments: tuple[Segment, ...]
    chunks: tuple[tuple[tuple[range, ...], ...], ...]

    @property
    def ring_size(self) -> int:
        return len(self.chunks)

    def real(self, rank: int) -> int:
        return sum(len(chunk) for chunk in chain.from_iterable(self.chunks[rank]))

    def work(self, rank: int) -> int:
        """Pairs of a query of this rank and a key that it sees."""
        return sum(seen(chunk) for chunk in chain.from_iterable(self.chunks[rank]))

    def places(self) -> tuple[Tensor, ...]:
        """By rank the places in the pack that it holds, in this order: segment by segment, then its share of the
        padding, of which all ranks together hold each place once."""
        share = sum(segment.padded for segment in self.segments) // self.ring_size
        padding = iter(place for s in self.segments for place in range(s.start + s.length, s.start + s.padded))
        held = []
        for rank in range(self.ring_size):
            found = [
                torch.arange(segment.start + chunk.start, segment.start + chunk.stop)
                for segment, chunks in zip(self.segments, self.chunks[rank], strict=True)
                for chunk in chunks
            ]
            rest = [next(padding) for _ in range(share - self.real(rank))]
            held.append(torch.cat([*found, torch.tensor(rest, dtype=torch.int64)]))
        return tuple(held)


def seen(chunk: range) -> int:
    """Keys that the queries at these positions see, each itself too."""
    return (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2


def cut(segments: Sequence[Segment], owners: Sequence[int]) -> Cut:
    """`owners` says for each chunk of a segment which rank holds it; every rank holds as many, one or two."""
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
        for rank, found in enumerate(held):
            chunks[rank].append(tuple(found))
            tokens[rank] += sum(len(chunk) for chunk in found)
            work[rank] += sum(seen(chunk) for chunk in found)
    return Cut(tuple(segments), tuple(tuple(of_rank) for of_rank in chunks))


def _sizes(length: int, owners: Sequence[int], tokens: Sequence[int], work: Sequence[int]) -> list[int]:
    """Of the chunks of a segment: all the same, but for the tokens that are dealt out."""
    base, left = divmod(length, len(owners))
    sizes = [base] * len(owners)
    if not left:
        return sizes
    ranks = sorted(range(len(tokens)), key=lambda rank: (work[rank], rank))
    fewest = min(tokens)
    # Ranks hold `fewest` tokens or one more, so that after the first round all hold as many.
    turns = [[rank for rank in ranks if tokens[rank] == fewest], ranks, ranks]
    free = [[chunk for chunk, owner in enumerate(owners) if owner == rank] for rank in range(len(tokens))]
    # A token sees as many keys as stand before it; what each rank is to have when all are dealt out.
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
