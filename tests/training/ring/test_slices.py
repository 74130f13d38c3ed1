"""What is seen, who holds what and how it travels: any of them together are one masked softmax."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.simulate import Sizes
from bench.together import whole_ring
from rlexp.launch.joining import RankSpec
from rlexp.training.ring.calls import meet, once
from rlexp.training.ring.kernels import Plain, get_kernel
from rlexp.training.ring.kernels.base import Ask, Grads
from rlexp.training.ring.layouts import get_layout
from rlexp.training.ring.layouts.ringwise import Ringwise, Way
from rlexp.training.ring.placement import Placement, placed, zigzag
from rlexp.training.ring.slices import Slice, slices_of
from rlexp.training.ring.transports.gather import gathered
from rlexp.training.ring.transports.travel import direct, neighbour
from rlexp.training.ring.widths import Costs, deal
from rlexp.training.types import Segment
from rlexp.training.world.groups import build_world
from tests.helpers.forests import dense, forest_of, seen
from tests.helpers.ranks import on_ranks

TRAVELS: dict[str, Way] = {"direct": direct, "neighbour": neighbour, "gather": gathered}
CPU = torch.device("cpu")
TOLERANCE = 1e-12  # of numbers near 1; measured over 2,000 forests: 2e-14
WINDOWS = st.sampled_from([None, None, 1, 2, 5, 17, 64, 150])


@st.composite
def forests(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Draw trees of a depth of three at most, with awkward lengths."""
    trees: list[tuple[int, int | None]] = []
    depths: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        parents = [None, *(number for number, depth in enumerate(depths) if depth < 3)]
        parent = draw(st.sampled_from(parents))
        trees.append((draw(st.one_of(st.integers(1, 7), st.integers(1, 200))), parent))
        depths.append(1 if parent is None else depths[parent] + 1)
    return forest_of(trees)


def scattered(seed: int, alive: int) -> object:
    """Return a placement that cuts anywhere, and gives the chunks to any of the first ranks that live."""

    def place(segments: tuple[Segment, ...], ring_size: int) -> Placement:
        chance = random.Random(seed)
        ranks = chance.sample(range(ring_size), min(alive, ring_size))
        chunks = []
        for s in segments:
            ends = sorted({0, s.length, *(chance.randint(0, s.length) for _ in range(chance.randint(0, 10)))})
            runs = (range(s.start + a, s.start + b) for a, b in itertools.pairwise(ends))
            chunks.append([(chance.choice(ranks), run) for run in runs])
        return placed(segments, chunks, ring_size)

    return place


@settings(max_examples=40)
@given(forests(), WINDOWS, st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(0, 999),
       st.sampled_from(["plain", "cpu_flash"]))  # fmt: skip
def test_any_forest_window_placement_and_transport_is_one_softmax(
    segments, window, ring_size, alive, kv_heads, seed, kernel
) -> None:
    sizes = Sizes(4, kv_heads, 8, torch.float64, CPU)
    inputs = sizes.drawn(sum(segment.padded for segment in segments), seed)
    expected = dense(segments, window, inputs, sizes.scale)
    for name, travel in TRAVELS.items():
        layout = Ringwise("scattered", scattered(seed, alive), travel)
        got = whole_ring(layout, segments, ring_size, get_kernel(kernel, "cpu"), sizes, inputs, window)
        for part, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert (a - b).abs().max() < TOLERANCE, (name, part)


class Narrow(Plain):
    """Returns the gradients of keys in the dtype of the keys, as kernels for GPUs do."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, *args: Any) -> Grads:
        dq, dk, dv = super().backward(dout, q, k, *args)
        return dq, dk.bfloat16(), dv.bfloat16()


@settings(max_examples=10)
@given(forests(), WINDOWS, st.integers(2, 8), st.integers(0, 999))
def test_gradients_travel_in_the_dtype_of_the_kernel_or_as_sums(segments, window, ring_size, seed) -> None:
    """Sender and receiver agree on it: `whole_ring` holds them to it. Measured: 6.5e-3 of the largest element."""
    sizes = Sizes(4, 2, 8, torch.bfloat16, CPU)
    inputs = sizes.drawn(sum(segment.padded for segment in segments), seed)
    expected = dense(segments, window, [x.double() for x in inputs], sizes.scale)
    for name, travel in TRAVELS.items():
        for place in (scattered(seed, ring_size), zigzag):
            got = whole_ring(Ringwise("any", place, travel), segments, ring_size, Narrow(), sizes, inputs, window)
            for part, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert (a.double() - b).abs().max() < 0.02 * b.abs().max() + 1e-6, (name, part)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(-50, 90), st.none() | st.integers(1, 60), st.data())
def test_a_narrowed_slice_is_the_same_part_of_the_mask(queries, keys, apart, window, data) -> None:
    """It has the very rows and columns in which there is something, and counts their pairs."""
    whole = Slice(range(queries), range(100, 100 + keys), apart, window)
    before = torch.arange(queries).unsqueeze(1) + apart - torch.arange(keys)
    mask = (before >= 0) & (before < (window or 1000))
    assert whole.pairs() == mask.sum()
    q = data.draw(st.tuples(st.integers(0, queries), st.integers(0, queries)))
    k = data.draw(st.tuples(st.integers(0, keys), st.integers(0, keys)))
    inside = torch.zeros_like(mask)
    inside[min(q) : max(q), min(k) : max(k)] = mask[min(q) : max(q), min(k) : max(k)]
    part = whole.narrowed(range(min(q), max(q)), range(100 + min(k), 100 + max(k)))
    if not inside.any():
        assert part is None
        return
    rows, columns = inside.any(1).nonzero().squeeze(1).tolist(), inside.any(0).nonzero().squeeze(1).tolist()
    assert ([*part.queries], [key - 100 for key in part.keys]) == (rows, columns)
    assert part.whole == bool(inside[rows][:, columns].all())
    assert part.pairs() == inside.sum()


@given(forests(), WINDOWS)
def test_what_is_seen_is_what_each_token_sees(segments, window) -> None:
    mask = seen(segments, window)
    counted = torch.zeros(mask.shape, dtype=torch.int64)
    for each in slices_of(segments, window):
        before = torch.arange(len(each.queries)).unsqueeze(1) + each.apart - torch.arange(len(each.keys))
        part = (before >= 0) & (before < (window or len(mask)))
        counted[each.queries.start : each.queries.stop, each.keys.start : each.keys.stop] += part
    assert torch.equal(counted, mask.long())


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(LENGTHS, st.sampled_from(["zigzag", "contiguous"]), st.sampled_from([2, 4, 8]))
def test_each_pair_of_ranks_makes_one_call_of_a_kind(lengths, name, ring_size) -> None:
    segments = forest_of([(length, None) for length in lengths])
    known = slices_of(segments), get_layout(name).place(segments, ring_size)
    for rank, source in itertools.product(range(ring_size), repeat=2):
        calls = meet(*known, rank, source)
        kinds = [call.causal for call in calls]
        assert kinds in ([], [rank == source])
        assert rank == source or not kinds or once(calls)


def test_a_layout_is_one_function() -> None:
    """Stripes of three tokens, dealt out in turn: nothing else knows of them."""

    def striped(segments, ring_size):
        stripes = [range(s.start, s.start + s.length) for s in segments]
        chunks = [
            [(number % ring_size, stripe[at : at + 3]) for number, at in enumerate(range(0, len(stripe), 3))]
            for stripe in stripes
        ]
        return placed(segments, chunks, ring_size)

    segments, sizes = forest_of([(50, None), (31, None), (9, 0)]), Sizes(4, 2, 8, torch.float64, CPU)
    inputs = sizes.drawn(90, 1)
    for window in (None, 7):
        expected = dense(segments, window, inputs, sizes.scale)
        layout = Ringwise("striped", striped, direct)
        got = whole_ring(layout, segments, 4, get_kernel("plain", "cpu"), sizes, inputs, window)
        assert max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) < TOLERANCE


TRAVELLED = (("zigzag", "direct"), ("zigzag", "neighbour"), ("allgather", "direct"))
FOREST = ((40, None), (7, 0), (33, 0), (1, None), (90, None), (5, 2))


SOME_WHOLE = Costs(token=100.0, step=400.0, row=1.0)  # by which the long trees are cut, and the short ones are not


def forest_rank(spec: RankSpec, several: list[tuple[str, str, Costs | None, int | None]]) -> list[list[Tensor]]:
    world, sizes = build_world(spec.world_size).ring, Sizes(8, 2, 8, torch.float64, CPU)
    segments, found = forest_of(FOREST), []
    for name, transport, costs, window in several:
        layout = get_layout(name, spec.world_size, transport, costs)
        padding = -176 % layout.multiple(spec.world_size) + layout.spare(spec.world_size)
        padded = (*segments[:-1], Segment(segments[-1].start, 5, 5 + padding, 2))
        index = layout.place(padded, spec.world_size).places[world.rank]
        q, k, v, dout = (x[index] for x in sizes.drawn(176 + spec.world_size, 3))
        for x in (q, k, v):
            x.requires_grad_()
        out = layout.plan(padded, world, get_kernel("cpu_flash", "cpu"), window).attend(q, k, v, Ask(0.3, window))
        found.append([index, out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_forests_and_windows_on_real_ranks(world: int) -> None:
    several = [
        (*layout, window)
        for layout in (("zigzag", "direct", None), ("zigzag", "neighbour", None), ("contiguous", "direct", None),
                       ("contiguous", "neighbour", None), ("allgather", "direct", None), ("ulysses", "direct", None),
                       *((*way, SOME_WHOLE) for way in TRAVELLED))
        for window in (None, 70 if "neighbour" in layout else 20)  # not short in a ring of four, so it goes around
    ]  # fmt: skip
    segments, sizes = forest_of(FOREST), Sizes(8, 2, 8, torch.float64, CPU)
    assert len({len(parts) for parts in deal(segments, world, SOME_WHOLE).parts}) > 1
    total = 176 + world  # rows that are drawn
    for case, results in zip(several, zip(*on_ranks(world, forest_rank, several), strict=True), strict=True):
        inputs = sizes.drawn(total, 3)
        expected = dense(segments, case[3], [x[:176] for x in inputs], 0.3)
        for part in range(4):
            whole = torch.zeros_like(inputs[max(0, part - 1)])
            for index, *parts in results:
                whole[index] = parts[part]
            assert (whole[:176] - expected[part]).abs().max() < TOLERANCE, (case, part)
