"""The planner: which calls of a kernel a rank makes, given what is seen and who holds what.

The queries of a rank meet the keys of another in runs, consecutive queries with consecutive keys. For one pair of ranks
the runs become one call for each kind of meeting. (A window can cut the keys of one query twice; then its runs are two
calls. A query meets its own segment and each of its ancestors in calls of their own.) Queries that see the same keys
share them. Most calls have the same few selections of queries, so each of these is made once a layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, product
from typing import TypeVar

from rlexp.training.ring.kernels.base import Lengths
from rlexp.training.ring.placement import Placement, Run
from rlexp.training.ring.selection import Selection, joined, selection
from rlexp.training.ring.slices import Slice

Ranges = tuple[range, ...]  # rows of a shard
Keys = tuple[tuple[int, range], ...]  # ranks, and rows of their shards
Whole = tuple[range, tuple[int, range]]  # queries that all see all of these keys
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Met:
    """One call of a kernel before its rows are selected: queries, and the keys that they share.

    It is causal, or a band with a window, or every query sees all of its keys.
    """

    keys: Mapping[Ranges, Keys]
    causal: bool
    window: int | None
    apart: Mapping[Ranges, int]  # positions from the last key to the last query; of a band alone

    @property
    def once(self) -> bool:
        """Say whether no key stands twice, so that the call's gradients are sums already."""
        return _once([self])


@dataclass(frozen=True)
class Arrival:
    """Where rows of some ranks lie in what arrives from them: by rank, which rows it sends, and where they begin."""

    sent: Mapping[int, tuple[Ranges, int]]

    def place(self, source: int, rows: range) -> range:
        """Return where these rows are, which the source sends one after the other."""
        starts, apart = self._places[source]
        first = rows.start + apart[bisect_right(starts, rows.start) - 1]
        return range(first, first + len(rows))

    @cached_property
    def _places(self) -> dict[int, tuple[list[int], list[int]]]:
        """Return by rank the starts of what it sends, in ascending order, and how far its rows move."""
        places = {}
        for rank, (ranges, begin) in self.sent.items():
            there = accumulate(map(len, ranges), initial=begin)
            moves = sorted((each.start, first - each.start) for each, first in zip(ranges, there, strict=False))
            places[rank] = ([start for start, _ in moves], [apart for _, apart in moves])
        return places


@dataclass(frozen=True)
class Part:
    """Some of a rank's queries, which meet keys together."""

    queries: Selection
    first: bool  # no part before it has any of these queries


@dataclass(frozen=True)
class Meeting:
    """One call of a kernel: a part of a rank's queries, and rows of what arrives."""

    part: int
    keys: Selection
    once: bool  # no key stands twice
    causal: bool
    window: int | None
    apart: Lengths | None


class Planner:
    """Knows of one pack, for one window, which queries of any rank meet which keys of any other."""

    def __init__(self, slices: Sequence[Slice], placement: Placement) -> None:
        self.slices, self.placement = slices, placement
        self.shares = any(each.queries != each.keys for each in slices)  # some segments have children
        starts = sorted({each.queries.start for each in slices if each.queries})
        self.held = [_by_segment(runs, starts) for runs in placement.runs]
        self._met: dict[tuple[int, ...], list[Met]] = {}

    def met(self, rank: int, *sources: int) -> list[Met]:
        """Return how the queries of a rank meet the keys of others, or its own."""
        if (rank, *sources) not in self._met:
            self._met[rank, *sources] = self._meet(rank, *sources)
        return self._met[rank, *sources]

    def needed(self, rank: int, source: int) -> Ranges:
        """Return the rows of a shard whose keys and values a rank needs, each once: in the order of its calls if none
        needs a row that another does, or in that of its first call if that needs all."""
        calls = [
            tuple(each for keys in met.keys.values() for _, each in keys if each) for met in self.met(rank, source)
        ]
        rows = tuple(chain.from_iterable(calls))
        if self.once(rank, source):
            return rows
        union = joined(rows)
        alone = _once(self.met(rank, source)[:1]) and count(calls[0]) == count(union)
        return calls[0] if alone else union

    def needed_elsewhere(self, source: int) -> Ranges:
        """Return the rows of a rank's shard whose keys and values any other rank needs."""
        rows = []
        for each in self.slices:
            own = self.held[source].get(each.queries.start, ())
            ends = [each.queries.start, *(end for run in own for end in (run.places.start, run.places.stop))]
            for queries in map(range, ends[::2], [*ends[1::2], each.queries.stop]):  # between our own runs
                for run in self.held[source].get(each.keys.start, ()):
                    piece = each.narrowed(queries, run.places)
                    rows += [_rows(run, piece.keys)] if piece is not None else []
        return joined(rows)

    def once(self, rank: int, source: int) -> bool:
        """Say whether the gradient of each of a rank's keys by another rank's queries is the result of one call."""
        return _once(self.met(rank, source))

    def _meet(self, rank: int, *sources: int) -> list[Met]:
        found: dict[tuple[bool, int | None], list[tuple[Ranges, Keys, int]]] = defaultdict(list)
        whole: list[tuple[range, tuple[int, range]]] = []
        for each in self.slices:
            queries = self.held[rank].get(each.queries.start, ())
            if queries and sources == (rank,) and each.queries == each.keys and _unbroken(each, queries):
                rows = tuple(run.rows for run in queries)
                found[True, None].append((rows, tuple((rank, each) for each in rows), 0))
                continue
            runs = [(source, run) for source in sources for run in self.held[source].get(each.keys.start, ())]
            for (source, k_run), q_run in product(runs, queries):
                piece = each.narrowed(q_run.places, k_run.places)
                if piece is None:
                    continue
                q_rows, k_rows = _rows(q_run, piece.queries), (source, _rows(k_run, piece.keys))
                if piece.whole:
                    whole.append((q_rows, k_rows))
                else:
                    found[piece.causal, piece.window].append(((q_rows,), (k_rows,), piece.last_apart))
        grouped = _by_keys(whole) if self.shares else _by_queries(whole)
        found[False, None] = [(queries, keys, 0) for queries, keys in grouped]
        return [
            Met({q: k for q, k, _ in call}, causal, window, {q: apart for q, _, apart in call})
            for (causal, window), several in found.items()
            for call in _without_repeats(several)
        ]


def _once(mets: Iterable[Met]) -> bool:
    """Say whether no key stands twice in some calls."""
    keys = chain.from_iterable(chain.from_iterable(met.keys.values()) for met in mets)
    met = sorted(keys, key=lambda each: (each[0], each[1].start))
    return all(one != other or rows.stop <= more.start for (one, rows), (other, more) in pairwise(met))


def _by_queries(whole: Iterable[Whole]) -> list[tuple[Ranges, Keys]]:
    """Put together queries that see the same keys. No query stands twice, so all are one call."""
    keys_of: dict[range, list[tuple[int, range]]] = defaultdict(list)
    for queries, keys in whole:
        keys_of[queries].append(keys)
    return [(tuple(queries), keys) for keys, queries in _swapped(keys_of)]


def _by_keys(whole: Iterable[Whole]) -> list[tuple[Ranges, Keys]]:
    """Put together keys that the same queries see. No key stands twice: those of a segment with children are selected
    once, however many of these see them, in a call before that of the children's own keys."""
    queries_of: dict[tuple[int, range], list[range]] = defaultdict(list)
    for queries, keys in whole:
        queries_of[keys].append(queries)
    return [(queries, tuple(keys)) for queries, keys in _swapped(queries_of)]


def _swapped(several: Mapping[A, Sequence[B]]) -> list[tuple[tuple[B, ...], list[A]]]:
    """Return each list of values once, with the keys that have it."""
    having: dict[tuple[B, ...], list[A]] = defaultdict(list)
    for each, values in several.items():
        having[tuple(values)].append(each)
    return [*having.items()]


def _by_segment(runs: Iterable[Run], starts: Sequence[int]) -> dict[int, list[Run]]:
    """Return runs by the place at which their segment begins, in the order of their places."""
    found = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.places.start):
        found[starts[bisect_right(starts, run.places.start) - 1]].append(run)
    return dict(found)


def _unbroken(own: Slice, runs: Sequence[Run]) -> bool:
    """Say whether a rank's runs of a segment see each other as if nothing lay between them: no window cuts them."""
    hull = range(runs[0].places.start, runs[-1].places.stop)
    part = own.narrowed(hull, hull)
    return part is not None and part.window is None


def count(ranges: Iterable[range]) -> int:
    return sum(map(len, ranges))


def _rows(run: Run, places: range) -> range:
    first = run.rows.start + places.start - run.places.start
    return range(first, first + len(places))


def _without_repeats(found: Iterable[tuple[Ranges, Keys, int]]) -> list[list[tuple[Ranges, Keys, int]]]:
    """Split runs into calls in which no query stands twice, and order each call by its queries.

    Those that are equally far apart lie together: some kernels take them in one launch.
    """
    calls: list[tuple[_Rows, list[tuple[Ranges, Keys, int]]]] = []
    for each in sorted(found, key=lambda each: (each[2], each[0][0].start)):
        for taken, call in (*calls, (_Rows(), [])):
            if not taken.meets(each[0]):
                taken.add(each[0])
                call.append(each)
                calls += [(taken, call)] if len(call) == 1 else []
                break
    return [call for _, call in calls]


class _Rows:
    """A set of rows."""

    def __init__(self) -> None:
        self.there = bytearray()

    def meets(self, ranges: Ranges) -> bool:
        return any(self.there.find(1, each.start, each.stop) >= 0 for each in ranges)

    def add(self, ranges: Ranges) -> None:
        for each in ranges:
            self.there.extend(bytes(max(0, each.stop - len(self.there))))
            self.there[each.start : each.stop] = b"\1" * len(each)


def planned(steps: Sequence[tuple[Sequence[Met], Arrival]]) -> tuple[tuple[Part, ...], tuple[tuple[Meeting, ...], ...]]:
    """Return the parts of a rank's queries, and its calls step by step.

    Calls share parts: the fewer there are, the less is copied and merged. So a call may have some queries to which it
    gives no keys, but not more than it has others.
    """
    every = [(number, met) for number, (mets, _) in enumerate(steps) for met in mets]
    orders: list[Sequence[Ranges]] = []
    part_of: dict[int, int] = {}
    for _, met in sorted(every, key=lambda each: (each[0] > 0, -_queries(each[1].keys))):
        fits = ([*met.keys] == order if met.window else _fits(met, order) for order in orders)
        part_of[id(met)] = next((number for number, does in enumerate(fits) if does), len(orders))
        if part_of[id(met)] == len(orders):
            orders.append([*met.keys])
    taken, parts = _Rows(), []
    for order in orders:
        parts.append(Part(selection(order), not any(taken.meets(queries) for queries in order)))
        for queries in order:
            taken.add(queries)
    meetings = (
        tuple(_meeting(met, part_of[id(met)], orders[part_of[id(met)]], arrival) for met in mets)
        for mets, arrival in steps
    )
    return tuple(parts), tuple(meetings)


def _fits(met: Met, order: Sequence[Ranges]) -> bool:
    return set(order).issuperset(met.keys) and _queries(order) <= 2 * _queries(met.keys)


def _queries(groups: Iterable[Ranges]) -> int:
    return sum(map(count, groups))


def _meeting(met: Met, part: int, order: Sequence[Ranges], arrival: Arrival) -> Meeting:
    keys = selection([arrival.place(*each) for each in met.keys.get(queries, ())] for queries in order)
    apart = tuple(met.apart[queries] for queries in order) if met.window else None
    return Meeting(part, keys, met.once, met.causal, met.window, apart)
