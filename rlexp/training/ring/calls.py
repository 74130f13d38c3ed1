"""The planner: which calls of a kernel a rank makes, given what is seen and who holds what.

The queries of a rank meet the keys of another in runs, consecutive queries with consecutive keys. For one pair of ranks
the runs become one call for each kind of meeting. (A window can cut the keys of one query twice; then its runs are two
calls. A query meets its own segment and each of its ancestors in calls of their own.) Queries that see the same keys
share them. Most calls have the same few selections of queries, so each of these is made once a layer.

Queries are rows of the rank's shard. Keys are rows of the ring: all shards, one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product

from rlexp.training.ring.kernels.base import Call
from rlexp.training.ring.placement import Placement, Run
from rlexp.training.ring.selection import Ranges, Selection, count, disjoint, joined, where
from rlexp.training.ring.slices import Slice

Step = tuple[list[Call], list[tuple[range, int]]]  # and where the keys lie in what arrives
Met = tuple[Ranges, Ranges, int]  # queries, the keys that they share, and positions from the last key to the last query


def meet(slices: Sequence[Slice], placement: Placement, rank: int, *sources: int) -> list[Call]:
    """Return the calls in which the queries of a rank meet the keys of others, or its own."""
    by_kind: dict[tuple[bool, int | None], list[Met]] = defaultdict(list)
    whole: list[tuple[range, range]] = []
    shards = [(source, source * placement.share) for source in sources]
    for each in slices:
        queries = placement.held(rank, each.queries)
        runs = [(places, row + begin) for source, begin in shards for places, row in placement.held(source, each.keys)]
        if queries and sources == (rank,) and each.queries == each.keys and _unbroken(each, queries):
            rows, keys = (tuple(_rows(run, run[0]) for run in several) for several in (queries, runs))
            by_kind[True, None].append((rows, keys, 0))
            continue
        for k_run, q_run in product(runs, queries):
            piece = each.narrowed(q_run[0], k_run[0])
            if piece is None:
                continue
            q_rows, k_rows = _rows(q_run, piece.queries), _rows(k_run, piece.keys)
            if piece.whole:
                whole.append((q_rows, k_rows))
            else:
                by_kind[piece.causal, piece.window].append(((q_rows,), (k_rows,), piece.last_apart))
    if any(each.queries != each.keys for each in slices):
        # Some segments have children. The keys of each are selected once, however many of these see them, in a call
        # before that of the children's own keys.
        grouped = [(queries, keys) for keys, queries in _alike((keys, queries) for queries, keys in whole)]
    else:
        grouped = _alike(whole)  # no query stands twice, so all are one call
    by_kind[False, None] = [(queries, keys, 0) for queries, keys in grouped]
    return [
        Call(*_selected(met), causal, window, tuple(apart for *_, apart in met) if window else None)
        for (causal, window), several in by_kind.items()
        for met in _without_repeats(several)
    ]


def by_pair(
    slices: Sequence[Slice], placement: Placement, rank: int
) -> tuple[dict[tuple[int, int], list[Slice]], set[int]]:
    """Sort slices by who holds queries and who holds keys, where one of the two is this rank; and say how many places
    any queries of the ring are after keys that they see."""
    pairs, apart, ranks = defaultdict[tuple[int, int], list[Slice]](list), set[int](), len(placement.runs)
    for each in slices:
        queries, keys = placement.holders(each.queries), placement.holders(each.keys)
        if len(apart) < ranks - 1 and len(queries | keys) > 1:
            apart |= {(one - other) % ranks for one in queries for other in keys if one != other}
        if rank in queries:
            for other in keys:
                pairs[rank, other].append(each)
        if rank in keys:
            for other in queries - {rank}:
                pairs[other, rank].append(each)
    return pairs, apart


def _selected(met: Sequence[Met]) -> tuple[Selection, Selection]:
    return Selection(tuple(queries for queries, *_ in met)), Selection(tuple(keys for _, keys, _ in met))


def needed(calls: Sequence[Call]) -> Ranges:
    """Return the rows whose keys and values some calls need, each once: in the order of the calls if none needs a row
    that another does, or in that of the first if it needs all."""
    rows = tuple(chain.from_iterable(chain.from_iterable(call.keys.segments) for call in calls))
    if once(calls):
        return rows
    union, first = joined(rows), calls[0].keys
    return tuple(chain.from_iterable(first.segments)) if once(calls[:1]) and first.count == count(union) else union


def needed_elsewhere(slices: Sequence[Slice], placement: Placement, source: int) -> Ranges:
    """Return the rows of a rank whose keys and values any other rank needs."""
    rows, begin = [], source * placement.share
    for each in slices:
        own = placement.held(source, each.queries)
        ends = [each.queries.start, *(end for places, _ in own for end in (places.start, places.stop))]
        for queries in map(range, ends[::2], [*ends[1::2], each.queries.stop]):  # between our own runs
            for places, row in placement.held(source, each.keys):
                piece = each.narrowed(queries, places)
                rows += [_rows((places, row + begin), piece.keys)] if piece is not None else []
    return joined(rows)


def once(calls: Iterable[Call]) -> bool:
    """Say whether no key stands twice in some calls: then the gradient of each is the result of one call."""
    return disjoint(rows for call in calls for ranges in call.keys.segments for rows in ranges)


def _alike(pairs: Iterable[tuple[range, range]]) -> list[tuple[Ranges, Ranges]]:
    """Put together those that have the same partners."""
    partners, having = defaultdict[range, list[range]](list), defaultdict[Ranges, list[range]](list)
    for one, other in pairs:
        partners[one].append(other)
    for one, others in partners.items():
        having[tuple(others)].append(one)
    return [(tuple(ones), others) for others, ones in having.items()]


def _unbroken(own: Slice, runs: Sequence[Run]) -> bool:
    """Say whether a rank's runs of a segment see each other as if nothing lay between them: no window cuts them."""
    hull = range(runs[0][0].start, runs[-1][0].stop)
    part = own.narrowed(hull, hull)
    return part is not None and part.window is None


def _rows(run: Run, places: range) -> range:
    start = run[1] + places.start - run[0].start
    return range(start, start + len(places))


def _without_repeats(several: Iterable[Met]) -> list[list[Met]]:
    """Split runs into calls in which no query stands twice, and order each call by its queries.

    Those that are equally far apart lie together: some kernels take them in one launch.
    """
    calls: list[tuple[_Rows, list[Met]]] = []
    for each in sorted(several, key=lambda each: (each[2], each[0][0].start)):
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
        self.taken = bytearray()

    def meets(self, ranges: Ranges) -> bool:
        return any(self.taken.find(1, each.start, each.stop) >= 0 for each in ranges)

    def add(self, ranges: Ranges) -> None:
        for each in ranges:
            self.taken.extend(bytes(max(0, each.stop - len(self.taken))))
            self.taken[each.start : each.stop] = b"\1" * len(each)


def sharing(steps: Sequence[Step]) -> tuple[dict[Selection, bool], tuple[tuple[Call, ...], ...]]:
    """Let calls share orders of queries. Return these, and whether no order before has any of the same queries; and the
    calls step by step, with their keys where these lie in what arrives.

    The fewer orders there are, the less is copied and merged. So a call may have some queries to which it gives no
    keys, but not more than it has others.
    """
    orders: list[Selection] = []
    order_of: dict[int, Selection] = {}
    every = [(number > 0, call) for number, (calls, _) in enumerate(steps) for call in calls]
    for _, call in sorted(every, key=lambda each: (each[0], -each[1].queries.count)):
        order = next((order for order in orders if _fits(call, order)), call.queries)
        order_of[id(call)] = order
        orders += [order] if order is call.queries else []
    taken, first = _Rows(), {}
    for order in orders:
        first[order] = not any(map(taken.meets, order.segments))
        for queries in order.segments:
            taken.add(queries)
    arrived = [(where(lying), calls) for calls, lying in steps]
    return first, tuple(tuple(_arrived(call, order_of[id(call)], at) for call in calls) for at, calls in arrived)


def _fits(call: Call, order: Selection) -> bool:
    if call.window:
        return call.queries.segments == order.segments
    return order.count <= 2 * call.queries.count and set(order.segments).issuperset(call.queries.segments)


def _arrived(call: Call, order: Selection, at: Callable[[range], range]) -> Call:
    keys = {
        queries: tuple(map(at, ranges))
        for queries, ranges in zip(call.queries.segments, call.keys.segments, strict=True)
    }
    return call.of(order, Selection(tuple(keys.get(queries, ()) for queries in order.segments)))
