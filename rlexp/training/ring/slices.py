"""What is seen: which queries of a pack see which keys.

A pack is a forest of segments. A segment sees itself up to each query, and each of its ancestors. Both say the same of
positions: a query sees the keys that are not after it. A window narrows this to the last few positions, the query's own
included. So a slice needs two ranges of places, how far apart their positions are, and the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlexp.training.types import Segment


class Slice(NamedTuple):
    """Consecutive queries and consecutive keys: a query sees the keys 0 to `window` − 1 positions before it."""

    queries: range  # places in the pack, or rows of what a rank holds
    keys: range
    apart: int  # positions from the first key to the first query
    window: int | None = None

    @property
    def last_apart(self) -> int:
        """Return the positions from the last key to the last query."""
        return self.apart + len(self.queries) - len(self.keys)

    @property
    def whole(self) -> bool:
        """Say whether every query sees every key."""
        return self.window is None and self.apart >= len(self.keys) - 1

    @property
    def causal(self) -> bool:
        """Say whether queries and keys are the same tokens, and each query sees all keys up to its own."""
        return self.window is None and self.apart == self.last_apart == 0

    def narrowed(self, queries: range, keys: range) -> Slice | None:
        """Keep the part of the slice in these ranges, without queries that see no key and keys that no query sees.

        The window goes if no pair is so far apart.
        """
        first, end = max(queries.start, self.queries.start), min(queries.stop, self.queries.stop)
        first_key, end_key = max(keys.start, self.keys.start), min(keys.stop, self.keys.stop)
        if first >= end or first_key >= end_key:
            return None
        apart, window = self.apart - self.queries.start + self.keys.start, self.window  # at place 0
        seeing, seen = max(first, first_key - apart), min(end_key, end + apart)
        if window is not None:
            first_key, end = max(first_key, first + apart - window + 1), min(end, end_key - 1 - apart + window)
        if seeing >= end or first_key >= seen:
            return None
        near = window is None or end - 1 + apart - first_key < window
        return Slice(range(seeing, end), range(first_key, seen), apart + seeing - first_key, None if near else window)

    def pairs(self) -> int:
        """Count the pairs of a query and a key that it sees."""
        seen = _not_after(self.apart, len(self.queries), len(self.keys))
        if self.window is None:
            return seen
        return seen - _not_after(self.apart - self.window, len(self.queries), len(self.keys))


def _not_after(apart: int, queries: int, keys: int) -> int:
    """Count the pairs in which the key is not after the query."""

    def up_to(count: int) -> int:
        """Add up how many of the keys the first queries see, if the first sees one key and each one more."""
        inside = min(max(count, 0), keys)
        return inside * (inside + 1) // 2 + max(count - keys, 0) * keys

    return up_to(apart + queries) - up_to(apart)


def seen(positions: range, window: int | None = None) -> int:
    """Count the keys that the queries at these positions see, each itself included."""
    whole = positions.stop * (positions.stop + 1) - positions.start * (positions.start + 1)
    if window is None or window >= positions.stop:
        return whole // 2
    return whole // 2 - seen(range(max(positions.start - window, 0), positions.stop - window))


def slices_of(segments: Sequence[Segment], window: int | None = None) -> tuple[Slice, ...]:
    """Say what the segments of a pack see: for each, itself and then its ancestors, the nearest first."""
    slices, begins = [], begins_of(segments)
    for segment, begin in zip(segments, begins, strict=True):
        queries, seen = _range(segment), segment
        slices.append(Slice(queries, queries, 0, window))
        while seen.parent is not None:
            apart = begin - begins[seen.parent]
            seen = segments[seen.parent]
            slices.append(Slice(queries, _range(seen), apart, window))
    return tuple(slices)


def begins_of(segments: Sequence[Segment]) -> list[int]:
    """Return the position of each segment's first token. A child continues where its parent ends, which comes first."""
    begins: list[int] = []
    for segment in segments:
        parent = segment.parent
        begins.append(0 if parent is None else begins[parent] + segments[parent].length)
    return begins


def _range(segment: Segment) -> range:
    return range(segment.start, segment.start + segment.length)
