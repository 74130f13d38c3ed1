"""Who holds what: the tokens of each rank.

A layout says for each segment which chunks it is cut into, and which rank holds each of them. `cut` makes chunks that
are even, so that only the pack as a whole needs padding: the remainder is dealt out, one token to a chunk, to the ranks
that hold the fewest tokens; among those, to the ones with the least attention to compute. So the numbers of tokens that
ranks hold differ by one at most, whatever the lengths of the segments, and padding is less than a token per rank.

zigzag      A segment is cut into 2 × ring chunks, and rank r holds the chunks r and 2·ring − 1 − r. So every rank has
            an early and a late piece, and the same work at every step of the ring:

                ring 4   chunk  0 1 2 3 4 5 6 7
                         rank   0 1 2 3 3 2 1 0

contiguous  A segment is cut into as many chunks as the ring has ranks, and rank r holds chunk r. The last rank attends
            to everything and the first to itself alone, so half of the ring's time is spent waiting: a comparison.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from torch import Tensor

from rlexp.training.ring.selection import Ranges, count, in_a_row, in_turn
from rlexp.training.ring.slices import begins_of, seen
from rlexp.training.types import Segment

Window = int | None  # positions that a query sees, its own included; None: all up to its own
Chunk = tuple[int, range]  # the rank that holds it, and its places in the pack
Run = tuple[range, int]  # places of a segment, and the row of a shard at which they begin


@dataclass(frozen=True)
class Placement:
    """Shares of a pack: each field has one entry per rank. Each place goes to one rank."""

    runs: tuple[Ranges, ...]  # places in the pack, in the order in which the rank holds them
    real: tuple[int, ...]  # tokens without padding

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        return tuple(map(in_turn, self.runs))

    @cached_property
    def share(self) -> int:
        """Return the most rows of any rank. Rank r's rows of the ring begin at r times as many."""
        return max(map(count, self.runs))

    def own(self, rows: Ranges, rank: int) -> Ranges:
        """Return which rows of its shard these rows of the ring are, which a rank holds."""
        first = rank * self.share
        return tuple(range(each.start - first, each.stop - first) for each in rows)

    def held(self, rank: int, places: range) -> list[Run]:
        """Return a rank's runs of a segment, which has these places, in their order."""
        starts, runs, known = self._by_place[rank]
        if places and places.start not in known:
            known[places.start] = runs[bisect_left(starts, places.start) : bisect_left(starts, places.stop)]
        return known[places.start] if places else []

    def holders(self, places: range) -> frozenset[int]:
        """Return the ranks that hold tokens of a segment, which has these places."""
        starts, owners = self._owners
        return frozenset(owners[bisect_left(starts, places.start) : bisect_left(starts, places.stop)])

    @cached_property
    def _owners(self) -> tuple[list[int], list[int]]:
        """Return where runs begin, in ascending order, and who holds each."""
        runs = sorted((each.start, rank) for rank, runs in enumerate(self.runs) for each in runs)
        return [start for start, _ in runs], [rank for _, rank in runs]

    @cached_property
    def _by_place(self) -> list[tuple[list[int], list[Run], dict[int, list[Run]]]]:
        ordered = [sorted(in_a_row(runs), key=lambda run: run[0].start) for runs in self.runs]
        return [([places.start for places, _ in runs], runs, {}) for runs in ordered]


def placed(segments: Sequence[Segment], chunks: Sequence[Sequence[Chunk]], ranks: int) -> Placement:
    """Lay out each rank's shard: its first chunks of all segments, then its second chunks, and so on.

    So the first chunks lie together, as the last ones do. Padding goes to the ranks that hold fewest tokens.
    """
    held: list[dict[int, list[range]]] = [defaultdict(list) for _ in range(ranks)]
    for of_segment in chunks:
        number = [0] * ranks
        for owner, places in of_segment:
            if places:
                held[owner][number[owner]].append(places)
            number[owner] += 1
    runs = [[*chain.from_iterable(of_rank[number] for number in sorted(of_rank))] for of_rank in held]
    real = tuple(map(count, runs))
    fewest = [(tokens, rank) for rank, tokens in enumerate(real)]
    heapq.heapify(fewest)
    for place in (place for s in segments for place in range(s.start + s.length, s.start + s.padded)):
        tokens, rank = fewest[0]
        runs[rank].append(range(place, place + 1))
        heapq.heapreplace(fewest, (tokens + 1, rank))
    return Placement(tuple(map(tuple, runs)), real)


def work_of(segments: Sequence[Segment], placement: Placement, window: Window = None) -> list[int]:
    """Count by rank the pairs of a query that it holds and a key that this sees."""
    work = [0] * len(placement.runs)
    for segment, begin in zip(segments, begins_of(segments), strict=True):
        places = range(segment.start, segment.start + segment.length)
        for rank in range(len(work)):
            for run, _ in placement.held(rank, places):
                work[rank] += _seen(run, segment, begin, window)
    return work


def _seen(places: range, segment: Segment, begin: int, window: Window = None) -> int:
    """Count the keys that the queries at places of a segment see, which begins at a position."""
    first = begin + places.start - segment.start
    return seen(range(first, first + len(places)), window)


def zigzag(segments: Sequence[Segment], ring_size: int) -> Placement:
    ranks = range(ring_size)
    return cut(segments, [*ranks, *reversed(ranks)] if ring_size > 1 else [0])


def contiguous(segments: Sequence[Segment], ring_size: int) -> Placement:
    return cut(segments, range(ring_size))


def cut(segments: Sequence[Segment], owners: Sequence[int]) -> Placement:
    """Cut each segment into as many chunks as `owners` has entries: for each chunk, the rank that holds it."""
    ranks = max(owners) + 1
    tokens, work = [0] * ranks, [0] * ranks
    chunks: list[list[Chunk]] = []
    for segment, begin in zip(segments, begins_of(segments), strict=True):
        sizes = _sizes(segment.length, owners, tokens, work)
        bounds = accumulate(sizes, initial=segment.start)
        chunks.append([(owner, range(*pair)) for owner, pair in zip(owners, pairwise(bounds), strict=True)])
        for owner, places in chunks[-1]:
            tokens[owner] += len(places)
            work[owner] += _seen(places, segment, begin)
    return placed(segments, chunks, ranks)


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
