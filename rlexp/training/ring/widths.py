"""A width for every tree of a pack: how many ranks of a ring hold it, and which, so that the slowest is soon done.

A tree that one rank holds whole is one call of the kernel, and none of its keys travels. A long one must be cut, or its
rank would be the slowest. So trees are given out from the heaviest on: one that has more than a grain of the pack's
work is cut over as many neighbours as bring each below it, all others are held whole by the rank with the least work.
At the end, what is cut levels the ranks. This is tried for several grains, and for each width that a fixed ring has;
the deal whose slowest rank is estimated to be done first is taken.

Work is counted in pairs of a query and a key that it sees, of a mean layer. It is a pure function of the pack, so that
all ranks come to the same.
"""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from rlexp.training.ring.slices import begins_of, seen
from rlexp.training.types import Segment

Part = tuple[int, int]  # a rank, and how many tokens of a segment it holds
Parts = tuple[Part, ...]

EVEN = 1.02  # the most loaded rank over the mean, up to which whole trees are given out
CONTENT = 1.005  # the slowest rank over the mean, with which we look no further
ALIKE = 0.99  # the slowest rank of a deal over that of another, with which they are alike
EARLY = 0.75  # of another rank's keys, as many are seen by our queries of a segment, and of ours see any: zigzag
LEAST = 8  # tokens of a rank's part of a segment; a segment with fewer is held whole
MANY = 1024  # trees that are dealt one by one
LEVELLED = 2  # trees for each rank whose shares are fitted to what the ranks hold else


@dataclass(frozen=True)
class Costs:
    """What a rank's part of a mean layer costs, both passes: in pairs of a query and a key."""

    token: float  # its matrix products
    trained: float = 0.0  # a trained token's part of the head, divided by the layers
    row: float = 0.0  # a key with its value that arrives, and their gradients that go home
    merge: float = 0.0  # a query whose output is merged with what it finds in another rank's keys
    step: float = 0.0  # another rank from which keys arrive, however many
    piece: float = 0.0  # a segment of a call
    most: int | None = None  # tokens of a rank; None: any number
    windows: tuple[int | None, ...] = (None,)  # of the layers

    def of(self, segment: Segment, begin: int) -> float:
        places = range(begin, begin + segment.length)
        pairs = sum(seen(places, window) for window in self.windows) / len(self.windows)
        return self.token * segment.length + self.trained * segment.trained + pairs


@dataclass(frozen=True)
class Deal:
    """Which ranks hold each segment, and the estimate by rank."""

    parts: tuple[Parts, ...]  # of each segment
    work: tuple[float, ...]  # by rank: what it computes
    sending: tuple[float, ...]  # by rank: what it costs that keys arrive

    @property
    def slowest(self) -> float:
        return max(map(sum, zip(self.work, self.sending, strict=True)))

    @property
    def mean(self) -> float:
        return (sum(self.work) + sum(self.sending)) / len(self.work)

    def better_than(self, other: Deal) -> bool:
        """Say whether the slowest rank is done first; if that is nearly even, whether there is less to do in all."""
        near = ALIKE * other.slowest < self.slowest < other.slowest / ALIKE
        return self.mean < other.mean if near else self.slowest < other.slowest


class Tree(NamedTuple):
    """A root with all that goes on from it, or several of these, for which it costs the same."""

    members: tuple[int, ...]  # places of its segments in the pack's list
    tokens: int
    cost: float
    rows: float  # of its keys that a rank needs which holds next to nothing of it
    trees: tuple[Tree, ...] = ()  # that are put together


def trees_of(segments: Sequence[Segment], costs: Costs) -> list[Tree]:
    """Return the trees of a pack, from the heaviest on."""
    begins, root, parents = begins_of(segments), list[int](), {segment.parent for segment in segments}
    members: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        root.append(number if segment.parent is None else root[segment.parent])
        members.setdefault(root[-1], []).append(number)
    trees = []
    for numbers in members.values():
        if not (tokens := sum(segments[each].length for each in numbers)):
            continue
        cost = sum(costs.of(segments[each], begins[each]) for each in numbers)
        rows = sum(segments[each].length * (1.0 if each in parents else EARLY) for each in numbers)
        trees.append(Tree(tuple(numbers), tokens, cost, rows))
    return sorted(trees, key=lambda tree: (-tree.cost, tree.members))


def bundled(trees: Sequence[Tree], most: float) -> list[Tree]:
    """Put light trees together, up to so much work: many would take long to deal, and need not be apart."""
    bundles: list[Tree] = []
    for tree in reversed(trees):
        last = bundles[-1] if bundles else None
        if last is not None and last.cost + tree.cost <= most:
            both = (*(last.trees or (last,)), tree)
            bundles[-1] = Tree(last.members + tree.members, last.tokens + tree.tokens, last.cost + tree.cost,
                               last.rows + tree.rows, both)  # fmt: skip
        else:
            bundles.append(tree)
    return sorted(bundles, key=lambda tree: (-tree.cost, tree.members))


def held_by(rank: int, dealt: Deal, segments: Sequence[Segment], costs: Costs) -> list[tuple[int, int, float]]:
    """Return a rank's parts of segments: how many ranks hold a sequence that ends there, tokens, and work."""
    begins, holders, held = begins_of(segments), list[frozenset[int]](), list[tuple[int, int, float]]()
    for segment, begin, parts in zip(segments, begins, dealt.parts, strict=True):
        before = holders[segment.parent] if segment.parent is not None else frozenset()
        holders.append(before | {each for each, tokens in parts if tokens})
        if tokens := dict(parts).get(rank, 0):
            held.append((len(holders[-1]), tokens, costs.of(segment, begin) * tokens / segment.length))
    return held


def even(segments: Sequence[Segment], ranks: int, costs: Costs) -> Deal:
    """Return the deal of a ring that cuts all trees alike."""
    hands = _Hands(segments, ranks, costs, sum(segment.length for segment in segments))
    hands.give(trees_of(segments, costs), lambda _: ranks, math.inf)
    return hands.deal()


def deal(segments: Sequence[Segment], ranks: int, costs: Costs) -> Deal:
    """Return the deal whose slowest rank is done first, by the estimate. No rank holds more than `costs.most` tokens,
    or than its share if that is more."""
    trees = trees_of(segments, costs)
    aim = sum(tree.cost for tree in trees) / ranks
    most = max(costs.most or sum(tree.tokens for tree in trees), -(-sum(tree.tokens for tree in trees) // ranks))
    if len(trees) > MANY:
        trees = bundled(trees, aim * ranks / MANY)
    best: Deal | None = None
    for way in _ways(trees, ranks, aim, costs):
        content = best is not None and best.slowest <= CONTENT * aim
        if best is not None and (way.least >= best.slowest or (content and not way.fixed)):
            continue
        for limit in (math.inf,) if way.fixed else (math.inf, EVEN):
            hands = _Hands(segments, ranks, costs, most, best.slowest / ALIKE if best else math.inf)
            hands.give(trees, way.width, limit * aim)
            if max(hands.tokens) <= most and not hands.too_late:
                dealt = hands.deal()
                best = dealt if best is None or dealt.better_than(best) else best
            if hands.most_whole <= EVEN * aim:
                break
    return best or _in_turn(segments, ranks, costs)


class Way(NamedTuple):
    """A way to give trees out."""

    width: Callable[[Tree], int]
    fixed: bool = False  # all trees have one width, as on a fixed ring
    least: float = 0.0  # no deal of this way is done before


def _ways(trees: Sequence[Tree], ranks: int, aim: float, costs: Costs) -> Iterator[Way]:
    fixed = [each for each in range(1, ranks + 1) if ranks % each == 0]
    widths = sorted({*fixed, *(1 << power for power in range(ranks.bit_length()))})
    heaviest, before = (trees[0].cost if trees else 0.0), list[int]()
    for halved in range(3 * ranks.bit_length()):
        grain = max(aim, heaviest) / 2**halved
        width = functools.partial(_wide_enough, widths, grain)
        if (given := [*map(width, trees)]) != before:
            before = given
            yield Way(width)
        if grain * ranks < heaviest / 2:
            break
    rows = sum(tree.rows for tree in trees)
    for each in reversed(fixed):
        sending = costs.row * rows * (1 - 1 / each) / ranks + costs.step * (each - 1)
        sending += costs.merge * EARLY * (each - 1) * sum(tree.tokens for tree in trees) / ranks
        yield Way(functools.partial(_wide_enough, [each], math.inf), True, aim + sending)


def _in_turn(segments: Sequence[Segment], ranks: int, costs: Costs) -> Deal:
    """Fill one rank after the other with an even share of the tokens: it fits always."""
    total, begins = sum(segment.length for segment in segments), begins_of(segments)
    ends = [total * (rank + 1) // ranks for rank in range(ranks)]
    hands, parts, place = _Hands(segments, ranks, costs, total), list[Parts](), 0
    for number, segment in enumerate(segments):
        first, held = place, list[Part]()
        while place < first + segment.length:
            rank = bisect_right(ends, place)
            held.append((rank, min(ends[rank], first + segment.length) - place))
            place += held[-1][1]
        parts.append(tuple(held) or ((0, 0),))
        cost = costs.of(segment, begins[number])
        tree = Tree((number,), segment.length, cost, segment.length)
        hands._hold(tree, dict(held), {rank: cost * count / segment.length for rank, count in held})
    return replace(hands.deal(), parts=tuple(parts))


def _wide_enough(widths: Sequence[int], grain: float, tree: Tree) -> int:
    """Return the first of these widths that brings a rank's part of a tree down to a grain, or the last one."""
    return next((each for each in widths if tree.cost <= each * grain), widths[-1])


@dataclass
class _Hands:
    """What each rank holds while trees are given out."""

    segments: Sequence[Segment]
    ranks: int
    costs: Costs
    most: int
    enough: float = math.inf  # the slowest rank of a deal that is known: one that takes longer need not be finished
    load: list[float] = field(init=False)  # by rank
    tokens: list[int] = field(init=False)  # by rank

    def __post_init__(self) -> None:
        self.load, self.tokens = [0.0] * self.ranks, [0] * self.ranks
        self.sending, self.sources = [0.0] * self.ranks, [0] * self.ranks  # and from which ranks keys arrive, as bits
        self.parts: dict[int, Parts] = {}
        self.lightest = [(0.0, rank) for rank in range(self.ranks)]
        self.most_whole = 0.0  # work of a rank to which a whole tree was given

    @property
    def too_late(self) -> bool:
        return self.most_whole > self.enough

    def deal(self) -> Deal:
        sending = [
            rows + self.costs.step * (sources & ~(1 << rank)).bit_count()
            for rank, (rows, sources) in enumerate(zip(self.sending, self.sources, strict=True))
        ]
        parts = tuple(self.parts.get(number, ()) or ((0, 0),) for number in range(len(self.segments)))
        return Deal(parts, tuple(self.load), tuple(sending))

    def give(self, trees: Sequence[Tree], width: Callable[[Tree], int], limit: float) -> None:
        """Give out all trees. One that no rank has room for, or that would bring each above the limit, is cut where
        there is room at the end."""
        wide: list[tuple[Tree, range]] = []
        late: list[tuple[Tree, range]] = []
        for tree in trees:
            if self.too_late:
                return
            across = 1 if tree.trees else width(tree)
            if across > 1:
                block = self._block(across)
                wide.append((tree, block))
                self._add(block, tree, 1)
            elif not self._whole(tree, limit):
                late += [(each, range(self.ranks)) for each in tree.trees or (tree,)
                         if not tree.trees or not self._whole(each, limit)]  # fmt: skip
        few = LEVELLED * self.ranks
        for tree, block in wide[few:]:
            self._even(tree, block)
        # The narrowest first: the widest can level the most.
        for tree, block in sorted(wide[:few], key=lambda each: len(each[1])):
            self._add(block, tree, -1)
            self._level(tree, block)
        for tree, block in late:
            self._level(tree, block)

    def _add(self, block: range, tree: Tree, sign: int) -> None:
        """Count an even share of a tree for each rank of a block, or take it back."""
        for number, rank in enumerate(block):
            self.load[rank] += sign * tree.cost / len(block)
            self.tokens[rank] += sign * (tree.tokens * (number + 1) // len(block) - tree.tokens * number // len(block))
            heapq.heappush(self.lightest, (self.load[rank], rank))

    def _block(self, width: int) -> range:
        """Return the neighbours of which the most loaded has least to do."""
        blocks = (range(first, first + width) for first in range(0, self.ranks - width + 1, width))
        return min(blocks, key=lambda block: (max(self.load[rank] for rank in block), block.start))

    def _whole(self, tree: Tree, limit: float) -> bool:
        """Give a tree to the rank with the least work that has room for it; say whether there is one."""
        passed, taken = [], False
        while self.lightest and not taken:
            load, rank = heapq.heappop(self.lightest)
            if load != self.load[rank]:
                continue  # it has been given more since
            if self.tokens[rank] + tree.tokens > self.most:
                passed.append((load, rank))
                continue
            if load + tree.cost > limit:
                passed.append((load, rank))
                break
            for number in tree.members:
                self.parts[number] = ((rank, self.segments[number].length),)
            self._hold(tree, {rank: tree.tokens}, {rank: tree.cost})
            self.most_whole = max(self.most_whole, self.load[rank])
            taken = True
        for each in passed:
            heapq.heappush(self.lightest, each)
        return taken

    def _hold(self, tree: Tree, tokens: dict[int, int], cost: dict[int, float]) -> None:
        """Count what ranks hold of a tree, and what they receive for it."""
        holding = [rank for rank, count in tokens.items() if count]
        among = sum(1 << rank for rank in holding)
        for rank in holding:
            self.tokens[rank] += tokens[rank]
            self.load[rank] += cost[rank] + self.costs.piece * len(tree.members) * len(holding)
            self.sending[rank] += self.costs.row * tree.rows * (1 - tokens[rank] / tree.tokens)
            self.load[rank] += self.costs.merge * EARLY * tokens[rank] * (len(holding) - 1)
            self.sources[rank] |= among if len(holding) > 1 else 0
            heapq.heappush(self.lightest, (self.load[rank], rank))

    def _even(self, tree: Tree, block: range) -> None:
        self._add(block, tree, -1)
        if min(self.most - self.tokens[rank] for rank in block) <= tree.tokens // len(block):
            self._level(tree, block)
        else:
            self._cut(tree, dict.fromkeys(block, 1 / len(block)))

    def _level(self, tree: Tree, block: range) -> None:
        """Cut a tree so that the ranks of a block have equally much to do with it, as far as they have room."""
        room = {rank: self.most - self.tokens[rank] for rank in block}
        if sum(max(0, tokens) for tokens in room.values()) < tree.tokens:
            room = {rank: self.most - self.tokens[rank] for rank in range(self.ranks)}
        room = {rank: tokens for rank, tokens in room.items() if tokens > 0}
        each = tree.cost / tree.tokens  # the work of a token
        level = _water_level([(self.load[rank], tokens * each) for rank, tokens in room.items()], tree.cost)
        shares = {rank: min(tokens, (level - self.load[rank]) / each) for rank, tokens in room.items()}
        enough = {rank: share for rank, share in shares.items() if share >= 0.5} or shares
        self._cut(tree, {rank: share / tree.tokens for rank, share in enough.items()})

    def _cut(self, tree: Tree, shares: dict[int, float]) -> None:
        """Cut the segments of a tree by these shares of its tokens; a short one is held whole where most is left."""
        whole = sum(shares.values())
        left = {rank: tree.tokens * share / whole for rank, share in shares.items()}
        room = {rank: self.most - self.tokens[rank] for rank in left}
        held = dict.fromkeys(left, 0)
        for number in sorted(tree.members, key=lambda each: self.segments[each].length):
            length = self.segments[number].length
            most = max(left, key=lambda rank: (left[rank], -rank))
            if length < LEAST * len(left) and left[most] >= length <= room[most] - held[most]:
                parts = {most: length}
            else:
                parts = _rounded(length, left, {rank: room[rank] - held[rank] for rank in left})
            for rank, count in parts.items():
                left[rank] -= count
                held[rank] += count
            self.parts[number] = tuple(sorted((rank, count) for rank, count in parts.items() if count))
        self._hold(tree, held, {rank: tree.cost * count / tree.tokens for rank, count in held.items()})


def _water_level(vessels: Sequence[tuple[float, float]], amount: float) -> float:
    """Return how high an amount stands in vessels, of which each has a floor and room above it."""
    floors = sorted(chain.from_iterable(((floor, 1), (floor + room, -1)) for floor, room in vessels))
    level, wide = floors[0][0], 0
    for height, more in floors:
        if wide and (height - level) * wide >= amount:
            return level + amount / wide
        amount -= (height - level) * wide
        level, wide = height, wide + more
    return level


def _rounded(length: int, left: dict[int, float], room: dict[int, int]) -> dict[int, int]:
    """Share out so many tokens in proportion to what is left for each rank, and no more than each has room for."""
    scale = length / max(sum(max(0.0, each) for each in left.values()), 1e-9)
    parts = {rank: min(int(max(0.0, each) * scale), max(0, room[rank])) for rank, each in left.items()}
    rest = length - sum(parts.values())
    # Those that miss most of a token come first; among equal ones, those that hold the fewest tokens.
    missing = {rank: round(parts[rank] - left[rank] * scale, 6) for rank in left}
    for rank in chain.from_iterable([sorted(left, key=lambda rank: (missing[rank], -room[rank], rank))] * 2):
        more = min(rest, max(0, room[rank] - parts[rank]), max(1, rest // len(left)))
        parts[rank] += more
        rest -= more
    if rest:  # there is no room: the first ranks take it
        parts[min(parts)] += rest
    return parts


def chunks_of(segment: Segment, parts: Parts) -> list[tuple[int, range]]:
    """Return the chunks of a segment: of each rank's part an early and a late half, so that all have the same work for
    each of their tokens."""
    if len(parts) == 1:
        return [(parts[0][0], range(segment.start, segment.start + segment.length))]
    halves = [(rank, count // 2) for rank, count in parts]
    late = [(rank, count - half) for (rank, count), (_, half) in zip(parts, halves, strict=True)]
    chunks, begin = [], segment.start
    for rank, count in (*halves, *reversed(late)):
        chunks.append((rank, range(begin, begin + count)))
        begin += count
    return chunks
