"""A width for every tree of a pack: deals as pure functions, and attention over what they place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import Sizes
from bench.together import whole_ring
from rlexp.training.dealer.forest import Share
from rlexp.training.dealer.packing import pack_sequences
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.layouts import get_layout
from rlexp.training.ring.slices import begins_of
from rlexp.training.ring.widths import ALIKE, Costs, Parts, deal
from rlexp.training.types import Segment
from tests.helpers.attention import forest
from tests.helpers.forests import dense

# The costs of a small model on CPUs, where short sequences are held whole; and costs by which cutting is nearly free.
USUAL = Costs(token=3072.0, trained=200.0, row=20.0, merge=15.0, step=7000.0, piece=700.0)
FREE = Costs(token=10.0, row=0.1, step=1.0, piece=1.0)
TOLERANCE = 1e-12  # of numbers near 1, as in test_slices.py


@st.composite
def packs(draw: st.DrawFn, longest: int = 1500) -> tuple[Segment, ...]:
    """Draw a forest, whose trees have up to two children: answers of a prompt."""
    segments: list[Segment] = []
    start = 0

    def add(length: int, parent: int | None) -> None:
        nonlocal start
        segments.append(Segment(start, length, length, parent, draw(st.integers(0, length))))
        start += length

    for _ in range(draw(st.integers(1, 12))):
        root = len(segments)
        add(draw(st.sampled_from((0, 1, 2, 3, 17, 97, longest // 6, longest))), None)
        for _ in range(draw(st.integers(0, 2))):
            add(draw(st.integers(1, 120)), root)
    add(draw(st.integers(1, 9)), None)
    return (*segments[:-1], replace(segments[-1], padded=segments[-1].padded + 7))


RANKS = st.sampled_from((2, 3, 4, 6, 8))
COSTS = st.sampled_from((USUAL, FREE, replace(USUAL, step=0.0, windows=(None, 64))))


@given(packs(), RANKS, COSTS, st.sampled_from((1.0, 1.01, 1.3)))
def test_every_token_is_held_once_and_no_rank_has_more_than_the_budget(segments, ranks, costs, slack) -> None:
    tokens = sum(segment.length for segment in segments)
    most = math.ceil(slack * -(-tokens // ranks))
    dealt = deal(segments, ranks, replace(costs, most=most))
    held = [0] * ranks
    for segment, parts in zip(segments, dealt.parts, strict=True):
        assert sum(count for _, count in parts) == segment.length
        assert len({rank for rank, _ in parts}) == len(parts)
        for rank, count in parts:
            held[rank] += count
    assert max(held) <= most
    placement = get_layout("zigzag", costs=replace(costs, most=most)).place(segments, ranks)
    assert torch.equal(torch.cat(placement.places).sort().values, torch.arange(tokens + 7))
    assert list(placement.real) == held
    assert min(map(len, placement.places)) > 0, "a rank without a token has a row of padding"


@given(packs(), RANKS, COSTS)
@settings(max_examples=30)
def test_no_fixed_ring_is_faster_by_the_estimate(segments, ranks, costs) -> None:
    dealt = deal(segments, ranks, costs)
    for width in (each for each in range(1, ranks + 1) if ranks % each == 0):
        a_token = costs.token + costs.trained + 1620  # ranks of a fixed ring may hold one less of some sequence
        assert dealt.slowest <= fixed(segments, ranks, width, costs) / ALIKE**2 + 2 * a_token


@given(st.lists(st.sampled_from((1, 17, 96, 256, 640, 2000)), min_size=1, max_size=4).map(tuple), COSTS)
@settings(max_examples=12)
def test_small_deals_are_near_the_best_that_there_is(lengths, costs) -> None:
    segments = forest(lengths, 1)
    assert deal(segments, 4, costs).slowest <= 1.1 * min(every_deal(segments, 4, costs))


def test_a_deal_of_ten_thousand_sequences_is_even() -> None:
    """Light trees are dealt in bundles, and all 64 ranks are still within 2 % of the mean."""
    lengths = [30 + 7919 * number % 700 for number in range(10_000)]
    dealt = deal(forest(tuple(lengths), 1), 64, USUAL)
    assert max(dealt.work) <= 1.02 * sum(dealt.work) / 64


def test_a_layout_takes_the_room_of_another_pack() -> None:
    """Scoring has a budget of its own."""
    tight = get_layout("zigzag", costs=replace(USUAL, most=700))
    segments = forest((1000, 400), 1)
    assert max(tight.place(segments, 2).real) == 700
    assert max(tight.with_room(1000).place(segments, 2).real) > 700
    assert get_layout("contiguous").with_room(1000) == get_layout("contiguous")


def test_segments_know_how_many_of_their_tokens_predict_a_trained_one() -> None:
    prompt, answers = np.arange(20), (np.array([30, 31, 32]), np.array([40]))
    pack = pack_sequences([(prompt, answer) for answer in answers], 1, share=Share())
    places = set(pack.place_N.tolist())
    assert len(places) == 4
    for segment in pack.segments:
        assert segment.trained == len(places & {*range(segment.start, segment.start + segment.length)})


def test_what_is_worth_it_decides_the_width() -> None:
    """Short sequences are held whole, and the one that would make its rank the slowest is cut."""
    short = forest((200,) * 32, 1)
    assert {len(parts) for parts in deal(short, 8, USUAL).parts} == {1}
    mixed = deal(forest((8000, *(200,) * 32), 1), 8, USUAL)
    assert len(mixed.parts[0]) > 4
    assert {len(parts) for parts in mixed.parts[1:]} == {1}
    assert {len(parts) for parts in deal(forest((200,), 1), 8, replace(USUAL, step=1e9)).parts} == {1}


@given(
    packs(longest=240),
    RANKS,
    COSTS,
    st.sampled_from((("zigzag", "direct"), ("zigzag", "neighbour"), ("allgather", "direct"))),
    st.none() | st.integers(1, 90),
)
@settings(max_examples=25)
def test_attention_over_a_deal_is_that_of_the_whole_pack(segments, ranks, costs, layout, window) -> None:
    """In float64, against one softmax over all tokens. The ring is played by one process."""
    sizes = Sizes(4, 2, 8, torch.float64, torch.device("cpu"))
    inputs = sizes.drawn(sum(segment.padded for segment in segments), 1)
    way = get_layout(layout[0], 1, layout[1], replace(costs, most=-(-sum(s.length for s in segments) // ranks)))
    got = whole_ring(way, segments, ranks, get_kernel("plain", "cpu"), sizes, inputs, window)
    expected = dense(segments, window, inputs, sizes.scale)
    real = sum(segment.length for segment in segments)
    assert max(float((a[:real] - b[:real]).abs().max()) for a, b in zip(got, expected, strict=True)) < TOLERANCE


# ---- the estimate, a second time ----


def cost_of(segments: Sequence[Segment], parts: Sequence[Parts], ranks: int, costs: Costs) -> float:
    """Return the estimate of the slowest rank, tree by tree, from the definition."""
    begins, root = begins_of(segments), list[int]()
    load, sources = [0.0] * ranks, [set[int]() for _ in range(ranks)]
    for number, segment in enumerate(segments):
        root.append(number if segment.parent is None else root[segment.parent])
    for tree in dict.fromkeys(root):
        members = [number for number in range(len(segments)) if root[number] == tree]
        tokens = [sum(dict(parts[each]).get(rank, 0) for each in members) for rank in range(ranks)]
        if not (total := sum(tokens)):
            continue
        work = rows = 0.0
        for each in members:
            segment, begin = segments[each], begins[each]
            work += costs.token * segment.length + costs.trained * segment.trained
            for window in costs.windows:
                work += sum(min(at + 1, window or at + 1) for at in range(begin, begin + segment.length)) / len(
                    costs.windows
                )
            rows += segment.length * (1.0 if any(other.parent == each for other in segments) else 0.75)
        holding = [rank for rank in range(ranks) if tokens[rank]]
        for rank in holding:
            load[rank] += work * tokens[rank] / total + costs.piece * len(members) * len(holding)
            load[rank] += costs.row * rows * (1 - tokens[rank] / total)
            load[rank] += costs.merge * 0.75 * tokens[rank] * (len(holding) - 1)
            sources[rank] |= {*holding} - {rank}
    return max(each + costs.step * len(others) for each, others in zip(load, sources, strict=True))


def evenly(length: int, block: range) -> Parts:
    ends = [length * number // len(block) for number in range(len(block) + 1)]
    return tuple((rank, end - begin) for rank, begin, end in zip(block, ends[:-1], ends[1:], strict=True))


def every_deal(segments: Sequence[Segment], ranks: int, costs: Costs) -> Iterator[float]:
    """Yield the estimate of every deal that cuts each sequence evenly over neighbours."""
    blocks = [range(first, first + width) for width in (1, 2, 4) for first in range(0, ranks, width)]
    for chosen in itertools.product(blocks, repeat=len(segments)):
        parts = [evenly(segment.length, block) for segment, block in zip(segments, chosen, strict=True)]
        yield cost_of(segments, parts, ranks, costs)


def fixed(segments: Sequence[Segment], ranks: int, width: int, costs: Costs) -> float:
    """Return the estimate of rings of a width, whose trees go to the ring with the least work, the heaviest first."""
    rings = [range(first, first + width) for first in range(0, ranks, width)]
    parts: list[Parts] = [()] * len(segments)
    root = list[int]()
    for number, segment in enumerate(segments):
        root.append(number if segment.parent is None else root[segment.parent])
    load = dict.fromkeys(range(len(rings)), 0.0)
    trees = {tree: [number for number in range(len(segments)) if root[number] == tree] for tree in dict.fromkeys(root)}

    def work(members: Sequence[int]) -> float:
        return cost_of(segments, [((0, segments[each].length),) if each in members else ((0, 0),)
                                  for each in range(len(segments))], 1, replace(costs, piece=0.0))  # fmt: skip

    works = {tree: work(members) for tree, members in trees.items()}
    for tree in sorted(trees, key=lambda tree: (-works[tree], tree)):
        ring = min(load, key=lambda ring: (load[ring], ring))
        load[ring] += works[tree]
        for each in trees[tree]:
            parts[each] = evenly(segments[each].length, rings[ring])
    return cost_of(segments, parts, ranks, costs)
