"""Transports from rank to rank, in steps: while a rank attends to what came, it sends and receives what comes next.

direct     At step s each rank sends to the rank s places after it in the ring the rows that its queries see, and
           nothing else. In the backward pass the same rows are sent again, and their gradients go straight back.
neighbour  Rows travel around the ring, from each rank to the next, as far as some rank's queries see them. So they
           cross from one node to another once, whatever the number of ranks that see them. Their gradients travel with
           them and are summed on the way; the last rank that sees the rows sends the sum home.

A message with the gradients of one call is in the dtype that the kernel returns, and loses nothing; a sum is in
float32. Ranks are named by their places in the ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.calls import Step, by_pair, meet, needed, needed_elsewhere, once
from rlexp.training.ring.collectives import Underway, between
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.kernels.fused import add_keys
from rlexp.training.ring.placement import Placement
from rlexp.training.ring.selection import Ranges, Selection, count, covers, in_a_row, select, within
from rlexp.training.ring.slices import Slice
from rlexp.training.ring.transports.base import ALL, Arrived, Home, KeyGrads, Transport
from rlexp.training.world.groups import Ring

OURS, NOTHING = 1, 2  # orders of `neighbour`, after that of our own calls


@dataclass(frozen=True)
class Coming:
    """Gradients that a rank receives after a step."""

    source: int
    count: int
    order: int | None = None  # of our own rows; None: a sum of others' rows, to which we add in the next step
    once: bool = False  # results of one call


@dataclass(frozen=True)
class Leg:
    """What is sent and received for a step: keys and values before it, and gradients after it."""

    to: int
    order: int | None  # of our own rows, which go; None: what came in the step before goes on
    source: int
    count: int  # rows that come
    back: int | None  # where their gradients go
    once: bool  # these are results of one call
    coming: tuple[Coming, ...]


@dataclass(frozen=True)
class Travel(Transport):
    ring: Ring
    orders: tuple[Selection, ...]  # in which our own rows are needed; the first is that of our own calls
    legs: tuple[Leg, ...]  # none on a ring of one

    def ready(self, x_tGD: Tensor) -> Tensor:
        return x_tGD.contiguous() if self.legs else x_tGD

    def keys(self, k_tGD: Tensor, v_tGD: Tensor) -> Iterator[Arrived]:
        # Most rows are sent several times in one order, which is also that of our own calls. A few orders are kept.
        own = functools.lru_cache(2)(lambda order: [select(x, self.orders[order].index) for x in (k_tGD, v_tGD)])
        here = own(0)
        for number in range(len(self.legs) + 1):
            coming = self._start(number, own, here)
            yield Arrived(ALL, number, *here)
            here = coming.wait()

    def _start(self, number: int, own: Callable[[int], Sequence[Tensor]], here: Sequence[Tensor]) -> Underway:
        if number == len(self.legs):
            return Underway([], [], [])
        leg = self.legs[number]
        going = here if leg.order is None else own(leg.order)
        coming = [(leg.source, x.new_empty(leg.count, *x.shape[1:])) for x in here]
        return between(self.ring, [(leg.to, x) for x in going], coming)

    def home(self, k_tGD: Tensor, v_tGD: Tensor, kernel: BlockKernel) -> Home:
        return TravelHome(self, k_tGD, v_tGD, kernel.gradient_dtype(k_tGD.dtype))

    def to(self, device: torch.device) -> Travel:
        return replace(self, orders=tuple(order.to(device) for order in self.orders))


class TravelHome(Home):
    def __init__(self, way: Travel, k_tGD: Tensor, v_tGD: Tensor, narrow: torch.dtype) -> None:
        super().__init__(k_tGD, v_tGD)
        self.way, self.narrow = way, narrow
        self.under_way: tuple[Sequence[Coming], Underway] | None = None
        self.sums: list[Tensor] | None = None  # that came in the step before, for us to add to

    def add(self, heads: slice, step: int, grads: Sequence[KeyGrads]) -> None:
        if step == 0:
            for call, dk, dv in grads:
                self.keep(within(self.way.orders[0].index, call.keys.index), dk, dv, heads, once=call.once)
            return
        leg = self.way.legs[step - 1]
        self.wait()  # for what other ranks computed in the step before
        going = [] if leg.back is None else [(leg.back, x) for x in self._message(leg, grads)]
        coming = [
            (each.source, x.new_empty(each.count, *x.shape[1:], dtype=self.narrow if each.once else self.wide))
            for each in leg.coming
            for x in self.like
        ]
        self.under_way = (leg.coming, between(self.way.ring, going, coming))

    def _message(self, leg: Leg, grads: Sequence[KeyGrads]) -> Sequence[Tensor]:
        """Lay the gradients in the order in which the rows came, and add them to the sum of the ranks before us."""
        dtype = self.narrow if leg.once else self.wide
        if self.sums is None and len(grads) == 1 and covers(grads[0][0].keys.index, leg.count):
            return [x.to(dtype).contiguous() for x in grads[0][1:]]
        sums = self.sums or [x.new_zeros(leg.count, *x.shape[1:], dtype=dtype) for x in self.like]
        for call, dk, dv in grads:
            add_keys(sums[0], sums[1], call.keys.index, dk, dv, once=call.once)
        return sums

    def wait(self) -> None:
        self.sums = None
        if self.under_way is None:
            return
        (coming, sent), self.under_way = self.under_way, None
        received = sent.wait()
        for each, dk, dv in zip(coming, received[::2], received[1::2], strict=True):
            if each.order is None:
                self.sums = [dk, dv]
            elif each.count:
                self.keep(self.way.orders[each.order].index, dk, dv)


def direct(slices: Sequence[Slice], placement: Placement, ring: Ring) -> tuple[Travel, list[Step]]:
    rank, size = ring.rank, ring.size
    pairs, apart = by_pair(slices, placement, rank)
    own = meet(pairs[rank, rank], placement, rank, rank)
    orders, legs, steps = [needed(own)], list[Leg](), [(own, in_a_row(needed(own)))]
    for number in sorted(apart):  # the same on all ranks, which the watch compares
        to, source = (rank + number) % size, (rank - number) % size
        theirs, ours = (meet(pairs[pair], placement, *pair) for pair in ((to, rank), (rank, source)))
        going, rows = needed(theirs), needed(ours)
        orders += [going] if going not in orders else []
        order = orders.index(going)
        home = Coming(to, count(going), order, once(theirs))
        legs.append(Leg(to, order, source, count(rows), source, once(ours), (home,)))
        steps.append((ours, in_a_row(rows)))
    return Travel(ring, _selected(orders, placement, rank), tuple(legs)), steps


def neighbour(slices: Sequence[Slice], placement: Placement, ring: Ring) -> tuple[Travel, list[Step]]:
    rank, size, legs = ring.rank, ring.size, []
    calls = functools.cache(functools.partial(meet, slices, placement))
    rows = [needed_elsewhere(slices, placement, each) for each in range(size)]
    orders = [needed(calls(rank, rank)), rows[rank], ()]
    steps = [(calls(rank, rank), in_a_row(orders[0]))]
    reach = [  # places to the last rank that needs a rank's rows
        next((far for far in range(size - 1, 0, -1) if calls((each + far) % size, each)), 0) for each in range(size)
    ]
    after, before = (rank + 1) % size, (rank - 1) % size
    for hop in range(1, max(reach) + 1):
        leaving, here, later = ((rank - each) % size for each in (hop - 1, hop, hop + 1))
        goes_on = hop < reach[here]
        coming = [Coming(before, count(rows[later]))] if hop < reach[later] and hop + 1 < size else []
        coming += [Coming((rank + hop) % size, count(rows[rank]), OURS)] if hop == reach[rank] else []
        going = NOTHING if hop > reach[leaving] else OURS if hop == 1 else None
        back = after if goes_on else here if hop == reach[here] else None
        comes = count(rows[here]) if hop <= reach[here] else 0
        legs.append(Leg(after, going, before, comes, back, once=False, coming=tuple(coming)))
        steps.append((calls(rank, here), in_a_row(rows[here])))
    return Travel(ring, _selected(orders, placement, rank), tuple(legs)), steps


def _selected(orders: Sequence[Ranges], placement: Placement, rank: int) -> tuple[Selection, ...]:
    return tuple(Selection((placement.own(rows, rank),)) for rows in orders)
