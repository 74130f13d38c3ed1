"""Whether ranks begin their collectives and messages in orders that fit together, over all groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from tests.helpers.delayed import Call

Event = Hashable  # the n-th call of a group, or the n-th message of a group from one rank to another


def disorder(journals: Sequence[Sequence[Call]]) -> str | None:
    """Return what is wrong with the calls of all ranks, if anything is.

    Each rank waits for the others in the order in which it begins. If the orders of all ranks together make a circle,
    kernels of two communicators may wait for each other. Messages of a batch begin as one.
    """
    begun = [list(_units(rank, journal)) for rank, journal in enumerate(journals)]
    seen: dict[Event, list[tuple[int, str, int]]] = {}
    for rank, units in enumerate(begun):
        for unit in units:
            for event, kind, size in unit:
                seen.setdefault(event, []).append((rank, kind, size))
    for event, found in seen.items():
        if len({_comparable(kind, size) for _, kind, size in found}) > 1 or len(found) != _expected(event):
            return f"{event}: {found}"
    roots = _joined(begun)
    order: dict[Event, set[Event]] = {}
    for units in begun:
        places = [roots[unit[0][0]] for unit in units]
        for before, after in itertools.pairwise(places):
            if before == after:
                return f"{before} is begun twice"
            order.setdefault(after, set()).add(before)
    try:
        TopologicalSorter(order).prepare()
    except CycleError as error:
        return f"these wait for each other: {error.args[1]}"
    return None


def _comparable(kind: str, size: int) -> tuple[str, int]:
    return "message" if kind in ("send", "recv") else kind, size


def _expected(event: Event) -> int:
    """Return how many ranks begin an event: both ends of a message, or all ranks of a group."""
    assert isinstance(event, tuple)
    _group, ranks, *ends, _number = event
    return len(ends or ranks)


def _units(rank: int, journal: Sequence[Call]) -> Iterator[list[tuple[Event, str, int]]]:
    """Yield what a rank begins as one."""
    counts: Counter[Event] = Counter()
    unit: list[tuple[Event, str, int]] = []
    batch = None
    for call in journal:
        if unit and (call.batch is None or call.batch != batch):
            yield unit
            unit = []
        ends: tuple[int, ...] = ()
        if call.peer is not None:
            ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
        event = (call.group, call.ranks, *ends, counts[call.group, ends])
        counts[call.group, ends] += 1
        unit.append((event, call.kind, call.size))
        batch = call.batch
    if unit:
        yield unit


def _joined(begun: Sequence[Sequence[Sequence[tuple[Event, str, int]]]]) -> dict[Event, Event]:
    """Return for each event the first of all that begin as one with it, on some rank."""
    roots: dict[Event, Event] = {}

    def root(event: Event) -> Event:
        while roots.setdefault(event, event) != event:
            event = roots[event]
        return event

    for units in begun:
        for unit in units:
            first = root(unit[0][0])
            for event, *_ in unit[1:]:
                roots[root(event)] = first
    return {event: root(event) for event in list(roots)}
