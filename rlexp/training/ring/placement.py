"""Who holds what: the runs of tokens of each rank.

A layout says for each segment which chunks it is cut into, and which rank holds each of them. `cut` makes chunks that
are even, so that only the pack as a whole needs padding: the remainder is dealt out, one token to a chunk, to the ranks
that hold the fewest tokens; among those, to the ones with the least attention to compute. So the numbers of tokens that
ranks hold differ by one at most, whatever the lengths of the segments, and padding is less than a token per rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from torch import Tensor

from rlexp.training.ring.selection import in_turn
from rlexp.training.ring.slices import begins_of, seen
from rlexp.training.types import Segment


class Chunk(NamedTuple):
    """Consecutive tokens of a segment, and the rank that holds them."""

    owner: int
    places: range  # in the pack


class Run(NamedTuple):
    """Consecutive tokens of a segment that a rank holds, and the rows of its shard where they are."""

    places: range
    rows: range


@dataclass(frozen=True)
class Placement:
    """The runs of each rank, in the order in which it holds them, and the places of padding that follow."""

    runs: tuple[tuple[Run, ...], ...]
    padding: tuple[tuple[range, ...], ...]

    def real(self, rank: int) -> int:
        return sum(len(run.rows) for run in self.runs[rank])

    def places(self) -> tuple[Tensor, ...]:
        """Return by rank the places in the pack that it holds, in order. Each place goes to one rank."""
        held = zip(self.runs, self.padding, strict=True)
        return tuple(in_turn([*(run.places for run in runs), *padding]) for runs, padding in held)


def placed(segments: Sequence[Segment], chunks: Sequence[Sequence[Chunk]], ranks: int) -> Placement:
    """Lay out each rank's shard: its first chunks of all segments, then its second chunks, and so on.

    So the first chunks lie together, as the last ones do. Padding goes to the ranks that hold fewest tokens.
    """
    held: list[dict[int, list[range]]] = [defaultdict(list) for _ in range(ranks)]
    for of_segment in chunks:
        number = [0] * ranks
        for chunk in of_segment:
            if chunk.places:
                held[chunk.owner][number[chunk.owner]].append(chunk.places)
            number[chunk.owner] += 1
    runs = []
    for of_rank in held:
        ordered = [*chain.from_iterable(of_rank[number] for number in sorted(of_rank))]
        starts = accumulate(map(len, ordered), initial=0)
        runs.append(tuple(Run(p, range(s, s + len(p))) for p, s in zip(ordered, starts, strict=False)))
    fewest = [(sum(len(run.rows) for run in of_rank), rank) for rank, of_rank in enumerate(runs)]
    heapq.heapify(fewest)
    padding: list[list[range]] = [[] for _ in range(ranks)]
    for place in (place for s in segments for place in range(s.start + s.length, s.start + s.padded)):
        tokens, rank = fewest[0]
        padding[rank].append(range(place, place + 1))
        heapq.heapreplace(fewest, (tokens + 1, rank))
    return Placement(tuple(runs), tuple(map(tuple, padding)))


def work_of(
    segments: Sequence[Segment], chunks: Sequence[Sequence[Chunk]], ranks: int, window: int | None = None
) -> list[int]:
    """Count by rank the pairs of a query that it holds and a key that this sees."""
    work = [0] * ranks
    for segment, begin, of_segment in zip(segments, begins_of(segments), chunks, strict=True):
        for chunk in of_segment:
            first = begin + chunk.places.start - segment.start
            work[chunk.owner] += seen(range(first, first + len(chunk.places)), window)
    return work


def cut(segments: Sequence[Segment], owners: Sequence[int]) -> list[list[Chunk]]:
    """Cut each segment into as many chunks as `owners` has entries: for each chunk, the rank that holds it."""
    ranks = max(owners) + 1
    tokens, work = [0] * ranks, [0] * ranks
    chunks = []
    for segment, begin in zip(segments, begins_of(segments), strict=True):
        sizes = _sizes(segment.length, owners, tokens, work)
        bounds = accumulate(sizes, initial=segment.start)
        chunks.append([Chunk(owner, range(*pair)) for owner, pair in zip(owners, pairwise(bounds), strict=True)])
        for chunk in chunks[-1]:
            first = begin + chunk.places.start - segment.start
            tokens[chunk.owner] += len(chunk.places)
            work[chunk.owner] += seen(range(first, first + len(chunk.places)))
    return chunks


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
