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

from rlexp.training.ring.collectives import Underway, between
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.kernels.fused import add_keys
from rlexp.training.ring.meetings import Arrival, Planner, count
from rlexp.training.ring.selection import Selection, covers, select, selection, within
from rlexp.training.ring.transports.base import ALL, Arrived, Given, Home, Transport
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
class Step:
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
    steps: tuple[Step, ...]  # none on a ring of one
    arrivals: tuple[Arrival, ...]

    def ready(self, x_tGD: Tensor) -> Tensor:
        return x_tGD.contiguous() if self.steps else x_tGD

    def keys(self, k_tGD: Tensor, v_tGD: Tensor) -> Iterator[Arrived]:
        # Most rows are sent several times in one order, which is also that of our own calls. A few orders are kept.
        own = functools.lru_cache(2)(lambda order: [select(x, self.orders[order].index) for x in (k_tGD, v_tGD)])
        here = own(0)
        for number in range(len(self.arrivals)):
            coming = self._start(number, own, here)
            yield Arrived(ALL, number, *here)
            here = coming.wait()

    def _start(self, number: int, own: Callable[[int], Sequence[Tensor]], here: Sequence[Tensor]) -> Underway:
        if number == len(self.steps):
            return Underway([], [], [], None)
        step = self.steps[number]
        going = here if step.order is None else own(step.order)
        coming = [(step.source, x.new_empty(step.count, *x.shape[1:])) for x in here]
        return between(self.ring, [(step.to, x) for x in going], coming)

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

    def add(self, heads: slice, step: int, parts: Sequence[Given]) -> None:
        if step == 0:
            for part in parts:
                self.keep(part._replace(rows=within(self.way.orders[0].index, part.rows)), heads)
            return
        now = self.way.steps[step - 1]
        self.wait()  # for what other ranks computed in the step before
        going = [] if now.back is None else [(now.back, x) for x in self._message(now, parts)]
        coming = [
            (each.source, x.new_empty(each.count, *x.shape[1:], dtype=self.narrow if each.once else self.wide))
            for each in now.coming
            for x in self.like
        ]
        self.under_way = (now.coming, between(self.way.ring, going, coming))

    def _message(self, step: Step, parts: Sequence[Given]) -> Sequence[Tensor]:
        """Lay the gradients in the order in which the rows came, and add them to the sum of the ranks before us."""
        dtype = self.narrow if step.once else self.wide
        if self.sums is None and len(parts) == 1 and covers(parts[0].rows, step.count):
            return [x.to(dtype).contiguous() for x in (parts[0].dk, parts[0].dv)]
        sums = self.sums or [x.new_zeros(step.count, *x.shape[1:], dtype=dtype) for x in self.like]
        for part in parts:
            add_keys(sums[0], sums[1], part.rows, part.dk, part.dv, once=part.once)
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
                self.keep(Given(self.way.orders[each.order].index, dk, dv))


def direct(planner: Planner, ring: Ring) -> Travel:
    rank, size, steps, orders = ring.rank, ring.size, [], [planner.needed(ring.rank, ring.rank)]
    arrivals = [Arrival({rank: (orders[0], 0)})]
    for number in range(1, size):
        to, source = (rank + number) % size, (rank - number) % size
        seen, needed = planner.needed(to, rank), planner.needed(rank, source)
        orders += [seen] if seen not in orders else []
        order = orders.index(seen)
        home = Coming(to, count(seen), order, planner.once(to, rank))
        steps.append(Step(to, order, source, count(needed), source, planner.once(rank, source), (home,)))
        arrivals.append(Arrival({source: (needed, 0)}))
    return Travel(ring, tuple(selection([order]) for order in orders), tuple(steps), tuple(arrivals))


def neighbour(planner: Planner, ring: Ring) -> Travel:
    rank, size, steps = ring.rank, ring.size, []
    needed = [planner.needed_elsewhere(each) for each in range(size)]
    orders = [planner.needed(rank, rank), needed[rank], ()]
    arrivals = [Arrival({rank: (orders[0], 0)})]
    reach = [  # places to the last rank that needs a rank's rows
        next((far for far in range(size - 1, 0, -1) if planner.needed((each + far) % size, each)), 0)
        for each in range(size)
    ]
    after, before = (rank + 1) % size, (rank - 1) % size
    for hop in range(1, size):
        leaving, here, later = ((rank - each) % size for each in (hop - 1, hop, hop + 1))
        goes_on = hop < reach[here]
        coming = [Coming(before, count(needed[later]))] if hop < reach[later] and hop + 1 < size else []
        coming += [Coming((rank + hop) % size, count(needed[rank]), OURS)] if hop == reach[rank] else []
        going = NOTHING if hop > reach[leaving] else OURS if hop == 1 else None
        back = after if goes_on else here if hop == reach[here] else None
        comes = count(needed[here]) if hop <= reach[here] else 0
        steps.append(Step(after, going, before, comes, back, once=False, coming=tuple(coming)))
        arrivals.append(Arrival({here: (needed[here], 0)}))
    return Travel(ring, tuple(selection([order]) for order in orders), tuple(steps), tuple(arrivals))
