"""Which units of a train batch are computed together, and by which replica.

A unit is what a loss reads together: a pair, an answer, a sample. Every rank deals the whole batch, and all come to the
same packs: a pure function of the units' tokens, the number of replicas and the size of a pack. Units that begin alike
lie next to each other in an order of all units, so a run of neighbours shares what it can. Such runs are cut where a
pack is full, and given out from the heaviest on: each to the replica with the least work so far, and there to the pack
with the least work that has room.

The work of a pack is `token` × its tokens + the pairs of a query and a key that it sees (`of_run.py` knows the model).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rlexp.training.dealer.forest import Forest, Share, common, copied, shared
from rlexp.training.ring.slices import seen
from rlexp.training.types import Example, Ids

Unit = Sequence[Ids]  # the sequences that a loss reads together
Places = tuple[int, ...]  # of units in their batch
AT_ONCE = 1 << 24  # tokens that are dealt together, where they are no train batch
EVEN = 1.02  # the busiest replica's work over the mean of all, with which we are content


def unit_of(example: Example) -> Unit:
    """Return the sequences of an example, each a prompt with an answer."""
    return [np.concatenate((example.prompt, answer)) for answer in example.answers]


class TooLargeError(Exception):
    """A unit that no pack has room for."""

    def __init__(self, place: int, tokens: int) -> None:
        super().__init__(f"unit {place}: {tokens} tokens")
        self.place, self.tokens = place, tokens


@dataclass(frozen=True)
class Size:
    """The tokens of some sequences, shared ones counted once, and the pairs of a query and a key that they see."""

    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: Size) -> Size:
        return Size(self.tokens - other.tokens, self.pairs - other.pairs)

    @staticmethod
    def of(places: range) -> Size:
        """Return the size of a run of tokens at these positions."""
        return Size(len(places), seen(places))


@dataclass(frozen=True)
class Room:
    """How much a pack takes: a number of units, or of tokens."""

    units: int | None = None
    tokens: int | None = None

    def has(self, units: int, size: Size) -> bool:
        return (self.units is None or units <= self.units) and (self.tokens is None or size.tokens <= self.tokens)


@dataclass(frozen=True)
class Dealer:
    replicas: int
    room: Room
    share: Share | None = None  # when sequences share their beginnings; None: never
    token: int = 0  # the work of a token, in pairs of a query and a key

    def deal_all(self, count: int, unit: Callable[[int], Unit]) -> Dealt:
        """Deal so many units, which are read in parts: they need not fit into memory all at once."""
        dealt = Dealt(((),) * self.replicas, ((),) * self.replicas, (0,) * self.replicas)
        part, tokens = list[Unit](), 0
        for place in range(count):
            part.append(unit(place))
            tokens += sum(map(len, part[-1]))
            if tokens >= AT_ONCE or place + 1 == count:
                first = place + 1 - len(part)
                try:
                    dealt = dealt.and_also(self.deal(part), first)
                except TooLargeError as error:
                    raise TooLargeError(first + error.place, error.tokens) from None
                part, tokens = [], 0
        return dealt if count else self.deal([])

    def deal(self, units: Sequence[Unit]) -> Dealt:
        given = _Given(units, self.share)
        sizes = [given.size((place,)) for place in range(len(units))]
        for place, size in enumerate(sizes):
            if not self.room.has(1, size):
                raise TooLargeError(place, size.tokens)
        runs = self._measured(self._cut(self._runs(units), sizes), given)
        return self._dealt(self._heaviest_first(runs), given)

    def with_room_for(self, tokens: int) -> Dealer:
        """Return a dealer whose packs have room for so many tokens at least."""
        if self.room.tokens is None or self.room.tokens >= tokens:
            return self
        return dataclasses.replace(self, room=Room(tokens=tokens))

    def work(self, size: Size) -> int:
        return self.token * size.tokens + size.pairs

    # ---- what begins alike ----

    def _runs(self, units: Sequence[Unit]) -> Iterator[tuple[list[int], list[Size]]]:
        """Yield units that begin alike, with what each of them saves beside the one before it."""
        if self.share is None:
            yield from (([place], [Size()]) for place in range(len(units)))
            return
        order = sorted(range(len(units)), key=lambda place: units[place][0].tobytes())
        places, saved = order[:1], [Size()]
        for before, place in pairwise(order):
            alike = common(units[before][0], units[place][0]) - 1  # the last token that they share is copied
            if alike < self.share.least:
                yield places, saved
                places, saved = [], []
            places.append(place)
            saved.append(Size.of(range(alike)) if len(places) > 1 else Size())
        if places:
            yield places, saved

    def _cut(self, runs: Iterable[tuple[list[int], list[Size]]], sizes: Sequence[Size]) -> Iterator[_Run]:
        """Cut runs of units where a pack is full."""
        for places, saved in runs:
            run = _Run()
            for place, less in zip(places, saved, strict=True):
                longer = run.with_unit(place, sizes[place], less)
                if not self.room.has(len(longer.places), longer.size):
                    yield run
                    longer = _Run().with_unit(place, sizes[place], Size())
                run = longer
            yield run

    def _measured(self, runs: Iterable[_Run], given: _Given) -> Iterator[_Run]:
        """Give each run the size that its forest has, which may share less than each unit with the one before it. Cut
        one that is larger than a pack."""
        waiting = [*runs][::-1]
        while waiting:
            run = waiting.pop()
            if len(run.places) == 1 or self.room.tokens is None:
                yield run
                continue
            size = given.size(run.places)
            if self.room.has(0, size):
                yield dataclasses.replace(run, size=size)
            else:
                waiting += run.halves()[::-1]

    # ---- packs ----

    def _dealt(self, runs: Sequence[_Run], given: _Given) -> Dealt:
        """Give runs out to few packs, equally many for each replica. Where the busiest replica has less to do for it,
        runs are cut, which share less then."""
        if self.room.units is not None:
            share = -(-len(given.units) // self.replicas)
            dealt = self._filled(runs, max(1, -(-share // self.room.units)), given)
            assert dealt is not None  # there is a place for each unit, and runs may be cut
            return dealt
        mean = sum(self.work(run.size) for run in runs) / self.replicas
        best = self._by_tokens(runs, given, mean)
        for parts in (1, 2, 4):  # of a replica's work
            if max(best.work) <= EVEN * mean:
                break
            dealt = self._by_tokens(self._lighter(runs, mean / parts, given), given, mean)
            best = dealt if max(dealt.work) < max(best.work) else best
        return best

    def _lighter(self, runs: Sequence[_Run], most: float, given: _Given) -> list[_Run]:
        light, waiting = list[_Run](), [*runs]
        while waiting:
            run = waiting.pop()
            halves = run.halves() if self.work(run.size) > most else ()
            waiting += self._measured(halves, given)
            light += () if halves else (run,)
        return self._heaviest_first(light)

    def _heaviest_first(self, runs: Iterable[_Run]) -> list[_Run]:
        return sorted(runs, key=lambda run: (-self.work(run.size), run.places))

    def _by_tokens(self, runs: Sequence[_Run], given: _Given, mean: float) -> Dealt:
        """Give runs out to as few packs as can be; a replica has one more, or one in eight more, if that is more
        even."""
        fewest, best = self._fewest(runs, given)
        for each in range(fewest + 1, fewest + max(1, fewest // 8) + 1):
            if max(best.work) <= EVEN * mean:
                break
            dealt = self._filled(runs, each, given)
            best = dealt if dealt is not None and max(dealt.work) < max(best.work) else best
        return best

    def _fewest(self, runs: Sequence[_Run], given: _Given) -> tuple[int, Dealt]:
        """Return how many packs each replica needs, and the deal."""
        assert self.room.tokens is not None
        least = max(1, -(-sum(run.size.tokens for run in runs) // (self.room.tokens * self.replicas)))
        most = least
        while (dealt := self._filled(runs, most, given)) is None:
            least, most = most + 1, most + max(1, most // 8)
        while least < most:
            middle = (least + most) // 2
            if (fewer := self._filled(runs, middle, given)) is not None:
                dealt, most = fewer, middle
            else:
                least = middle + 1
        return most, dealt

    def _filled(self, runs: Sequence[_Run], each: int, given: _Given) -> Dealt | None:
        """Give runs out from the heaviest on: each to the replica with the least work so far, there to the pack with
        the least work, if these have room. None if no pack has. Where units are counted, runs are cut to fit.

        Until a pack is full its size is an estimate: what it shares depends on all that is in it."""
        hands = [_Hand(self, each) for _ in range(self.replicas)]
        lightest = [(0, replica) for replica in range(self.replicas)]
        waiting = [*runs][::-1]
        while waiting:
            run, passed = waiting.pop(), []
            while lightest and not hands[lightest[0][1]].takes(run):
                passed.append(heapq.heappop(lightest))
            if lightest:
                work, replica = heapq.heappop(lightest)
                heapq.heappush(lightest, (work + self.work(run.size), replica))
            else:
                halves = run.halves() if self.room.units is not None else ()
                if not halves:
                    return None
                waiting += halves
            for one in passed:
                heapq.heappush(lightest, one)
        measured = [[(given.size(pack.places), pack.places) for pack in hand.packs] for hand in hands]
        if any(not self.room.has(0, size) for of_replica in measured for size, _ in of_replica):
            return None
        ordered = [sorted(each, key=lambda pack: (-self.work(pack[0]), pack[1])) for each in measured]
        return Dealt(
            packs=tuple(tuple(places for _, places in of_replica) for of_replica in ordered),
            sizes=tuple(tuple(size for size, _ in of_replica) for of_replica in ordered),
            forests=tuple(tuple(given.forest(places) for _, places in of_replica) for of_replica in ordered),
            work=tuple(sum(self.work(size) for size, _ in of_replica) for of_replica in ordered),
        )


class _Given:
    """The units of a batch, and what some of them share, which is found once."""

    def __init__(self, units: Sequence[Unit], share: Share | None) -> None:
        self.units, self.share = units, share
        self._forests: dict[Places, Forest] = {}

    def forest(self, places: Places) -> Forest:
        if places not in self._forests:
            sequences = [each for place in places for each in self.units[place]]
            self._forests[places] = copied(sequences) if self.share is None else shared(sequences, self.share)
        return self._forests[places]

    def size(self, places: Places) -> Size:
        size, ends = Size(), list[int]()
        for branch in self.forest(places).branches:
            begin = 0 if branch.parent is None else ends[branch.parent]
            ends.append(begin + len(branch.tokens))
            size += Size.of(range(begin, ends[-1]))
        return size


class _Hand:
    """The packs of a replica while they are filled."""

    def __init__(self, dealer: Dealer, packs: int) -> None:
        self.dealer, self.packs = dealer, [_Run()] * packs
        self.lightest = [(0, number) for number in range(packs)]

    def takes(self, run: _Run) -> bool:
        """Put a run into the pack with the least work that has room; False if none has."""
        passed = []
        while self.lightest and not self._fits(self.lightest[0][1], run):
            passed.append(heapq.heappop(self.lightest))
        taken = bool(self.lightest)
        if taken:
            number = heapq.heappop(self.lightest)[1]
            self.packs[number] = self.packs[number].and_also(run)
            passed.append((self.dealer.work(self.packs[number].size), number))
        for work, number in passed:
            if self.dealer.room.has(len(self.packs[number].places) + 1, self.packs[number].size):
                heapq.heappush(self.lightest, (work, number))
        return taken

    def _fits(self, number: int, run: _Run) -> bool:
        pack = self.packs[number]
        return self.dealer.room.has(len(pack.places) + len(run.places), pack.size + run.size)


@dataclass(frozen=True)
class Dealt:
    """The packs of each replica, equally many, as places of units in their batch; and the work of each replica."""

    packs: tuple[tuple[Places, ...], ...]
    sizes: tuple[tuple[Size, ...], ...]  # of each pack
    work: tuple[int, ...]
    # of each pack; none where units were read in parts
    forests: tuple[tuple[Forest, ...], ...] = field(default=(), compare=False)

    def and_also(self, other: Dealt, first: int) -> Dealt:
        """Return the packs of two parts of a batch; the other's units begin at place `first`."""
        return Dealt(
            packs=tuple(
                (*ours, *(tuple(first + place for place in pack) for pack in theirs))
                for ours, theirs in zip(self.packs, other.packs, strict=True)
            ),
            sizes=tuple(ours + theirs for ours, theirs in zip(self.sizes, other.sizes, strict=True)),
            work=tuple(ours + theirs for ours, theirs in zip(self.work, other.work, strict=True)),
        )

    def tokens(self, replica: int) -> list[int]:
        """Return the tokens of each of a replica's packs."""
        return [size.tokens for size in self.sizes[replica]]

    @property
    def size(self) -> Size:
        return sum((size for of_replica in self.sizes for size in of_replica), Size())

    def most_units(self, number: int) -> int:
        """Return the units of a pack, on the replica that has most in it."""
        return max(len(of_replica[number]) for of_replica in self.packs)

    @property
    def skew(self) -> float:
        """The work of the busiest replica over the mean."""
        return max(self.work) * len(self.work) / sum(self.work) if any(self.work) else 1.0


@dataclass(frozen=True)
class _Run:
    """Units that are computed together, with the size of each and what it saves beside the one before."""

    places: Places = ()
    sizes: tuple[tuple[Size, Size], ...] = ()
    size: Size = Size()

    def with_unit(self, place: int, size: Size, saved: Size) -> _Run:
        return _Run((*self.places, place), (*self.sizes, (size, saved)), self.size + size - saved)

    def and_also(self, other: _Run) -> _Run:
        return _Run(self.places + other.places, self.sizes + other.sizes, self.size + other.size)

    def halves(self) -> tuple[_Run, ...]:
        """Cut the run in two, which share nothing; nothing if it is a single unit."""
        if len(self.places) < 2:
            return ()
        middle = len(self.places) // 2
        return tuple(_Run._of(self.places[some], self.sizes[some]) for some in (slice(middle), slice(middle, None)))

    @staticmethod
    def _of(places: Places, sizes: Sequence[tuple[Size, Size]]) -> _Run:
        run = _Run()
        for number, (place, (size, saved)) in enumerate(zip(places, sizes, strict=True)):
            run = run.with_unit(place, size, saved if number else Size())
        return run
