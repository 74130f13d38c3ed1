"""Attention over a ring of real ranks, put together from its parts, and float64 attention with the whole matrix."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.simulate import call_of
from rlexp.launch.joining import RankSpec
from rlexp.training.ring.kernels import get_kernel
from rlexp.training.ring.kernels.base import Ask, Call
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring, build_world
from tests.helpers.ranks import on_ranks, seeded

HEADS, SIZE = 8, 16
# Largest difference relative to the largest element of the pack. Measured over all cases here: 1.6e-15, 3.7e-7.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}
Way = tuple[torch.dtype, str]  # the precision, and the kernel
# Queries and keys of each segment, whether the call is causal, and of a band its window and how far segments are apart.
CALLS: dict[str, Any] = {
    "one sequence": ((37,), (37,), True),
    "packed": ((5, 1, 31), (5, 1, 31), True),
    "earlier keys": ((5, 8), (12, 3), False),
    "one query each": ((1, 1, 1), (4, 2, 9), False),
    "no keys at first": ((4, 6), (0, 9), False),
    "no queries at last": ((4, 0), (3, 5), False),
    "holes": ((4, 0, 2, 3, 0), (3, 5, 0, 7, 0), False),
    "nothing meets": ((3, 0), (0, 4), False),
    "no segment": ((), (), True),
    "no query": ((0,), (6,), False),
    "a window": ((40,), (40,), False, 7, (0,)),
    "a window of one token": ((5, 2), (5, 2), False, 1, (0, 0)),
    "what a window leaves of earlier keys": ((6, 3), (6, 5), False, 7, (6, 3)),
    "fewer keys than queries": ((12, 9), (3, 2), False, 12, (11, 8)),
    "windows and earlier keys": ((40, 1, 6), (40, 9, 6), False, 7, (0, 0, 6)),
    # Kernels for GPUs go through tiles of up to 256 rows, and bound a window tile by tile.
    "a window over several tiles": ((700,), (900,), False, 300, (0,)),
    "fewer keys than queries over several tiles": ((600,), (200,), False, 500, (400,)),
}


def named_call(name: str) -> Call:
    return call_of(*CALLS[name])


def launches_of(call: Call) -> int:
    """Return how often a kernel for GPUs is launched: once, or once for all segments that are equally far apart."""
    met = [bool(q and k) for q, k in zip(call.queries.lengths, call.keys.lengths, strict=True)]
    return int(any(met)) if call.apart is None else len(dict.fromkeys(call.apart))


def forest(lengths: tuple[int, ...], multiple: int) -> tuple[Segment, ...]:
    """Lay segments end to end and pad the last one, as in a pack."""
    segments, start = [], 0
    for number, length in enumerate(lengths):
        padded = length + (-sum(lengths) % multiple if number == len(lengths) - 1 else 0)
        segments.append(Segment(start, length, padded))
        start += padded
    return tuple(segments)


def inputs(lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Draw q, k, v and the gradient of the output for each segment, (length, heads, size)."""
    return [
        [seeded(length, heads, SIZE, seed=100 * number + part, dtype=dtype)
         for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS))]
        for number, length in enumerate(lengths)
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, the number of ranks that share out the heads, the number of key/value heads, the transport, and the
    layer's window."""

    layout: str
    inner: int
    kv_heads: int
    transport: str = "direct"
    window: int | None = None

    def get(self) -> Layout:
        return get_layout(self.layout, self.inner, self.transport)


def cases(world: int, several: Sequence[int]) -> list[Case]:
    """Return every layout that a ring of this size can have."""
    layouts = [("zigzag", 1), ("contiguous", 1), ("allgather", 1), ("ulysses", world)]
    layouts += [("hybrid", inner) for inner in (2, 4) if 1 < inner < world]
    return [Case(*layout, kv_heads) for layout in layouts for kv_heads in several]


def attend_rank(spec: RankSpec, lengths: tuple[int, ...], several: Sequence[Case], *how: Any) -> list[list[Tensor]]:
    """Attend in one case after the other."""
    rings = {inner: build_world(spec.world_size, inner).ring for inner in dict.fromkeys(c.inner for c in several)}
    return [attend_part(rings[case.inner], lengths, case, *how) for case in several]


def attend_part(ring: Ring, lengths: tuple[int, ...], case: Case, dtype: torch.dtype, kernel: str) -> list[Tensor]:
    """Return the places in the pack that this rank holds, and its part of out, dq, dk, dv."""
    layout, kv_heads = case.get(), case.kv_heads
    segments = forest(lengths, layout.multiple(ring.size))
    index = layout.place(segments, ring.size).places[ring.rank]
    total = sum(segment.padded for segment in segments)
    packed = []
    for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS)):
        # Padding looks like any token, and its output has a large gradient: none of it may matter.
        whole = seeded(total, heads, SIZE, seed=9 + len(packed), dtype=dtype) * (100 if len(packed) == 3 else 1)
        for segment, tensors in zip(segments, inputs(lengths, kv_heads, dtype), strict=True):
            whole[segment.start : segment.start + segment.length] = tensors[part]
        packed.append(whole[index])
    q, k, v, dout = packed
    for tensor in (q, k, v):
        tensor.requires_grad_()
    plan = layout.plan(segments, ring, get_kernel(kernel, "cpu"), case.window)
    out = plan.attend(q, k, v, Ask(SIZE**-0.5))
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [index, out.detach(), *grads]


def attend_in_ways(
    spec: RankSpec, lengths: tuple[int, ...], several: Sequence[Case], ways: Sequence[Way]
) -> list[list[list[Tensor]]]:
    return [attend_rank(spec, lengths, several, *way) for way in ways]


def attend(
    world: int, lengths: tuple[int, ...], several: Sequence[Case], *ways: Way
) -> Iterator[tuple[Way, Case, list[list[Tensor]]]]:
    """Yield for each precision and kernel, and for each case, out, dq, dk, dv of each segment, put together from all
    ranks. All of them share one start of ranks."""
    by_rank = on_ranks(world, attend_in_ways, lengths, several, ways)
    for way, of_ranks in zip(ways, zip(*by_rank, strict=True), strict=True):
        for case, results in zip(several, zip(*of_ranks, strict=True), strict=True):
            yield way, case, put_together(world, lengths, results, way[0])


def put_together(
    world: int, lengths: tuple[int, ...], results: Sequence[list[Tensor]], dtype: torch.dtype
) -> list[list[Tensor]]:
    segments = forest(lengths, world)
    total = sum(segment.padded for segment in segments)
    held = torch.cat([result[0] for result in results])
    assert torch.equal(held.sort().values, torch.arange(total)), "each place is held exactly once"
    wholes = []
    for part in range(1, 5):
        whole = torch.zeros(total, *results[0][part].shape[1:], dtype=dtype)
        for result in results:
            whole[result[0]] = result[part]
        wholes.append(whole)
    return [[whole[s.start : s.start + s.length] for whole in wholes] for s in segments]


def full(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Compute float64 attention with the whole score matrix, and its gradients."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


@functools.cache
def expected_of(lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the results that all rings and kernels are compared with."""
    return [full(*tensors) for tensors in inputs(lengths, kv_heads, dtype)]


def flash(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Make one flash call over the whole sequence, in the dtype of its inputs."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    out = out.squeeze(0).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def error(got: list[list[Tensor]], expected: list[list[Tensor]]) -> Tensor:
    """Return the squared errors of out, dq, dk and dv, summed over the pack."""
    return sum(
        torch.stack([(a.double() - b).square().sum() for a, b in zip(*segment, strict=True)])
        for segment in zip(got, expected, strict=True)
    )


@functools.cache
def flash_error_of(lengths: tuple[int, ...], kv_heads: int) -> Tensor:
    """Return the error of one bfloat16 flash call for each segment."""
    expected = expected_of(lengths, kv_heads, torch.bfloat16)
    return error([flash(*tensors) for tensors in inputs(lengths, kv_heads, torch.bfloat16)], expected)
