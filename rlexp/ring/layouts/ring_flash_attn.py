"""The library ring-flash-attn in place of our own rings: its zigzag, and its llama3 functions as `allgather`.

Both let flash-attn attend, in bfloat16 alone. What they hold and compute differs from the layouts of ours that have the
same names:

    zigzag     every segment is cut into 2 × ring equal chunks, so each of them is padded to a multiple of that; flash-
               attn is not told of the padding and computes it, to no effect: it stands where no real token looks
    allgather  the pack, with its padding at the end, is cut into as many equal pieces as the ring has ranks; so the
               rank that has the end of a long sequence computes the most. The gradients of keys and values are summed
               up over the ring in bfloat16; ours are in float32

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rlexp.ring.cut import seen
from rlexp.ring.groups import Ring
from rlexp.ring.layout import Deal, Layout
from rlexp.ring.past_adapter import functions
from rlexp.types import Segment

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch

SUMMED = 4  # bytes of an element of dk and dv on their way around the library's zigzag


def library_layout(name: str) -> Layout:
    match name:
        case "zigzag":
            return LibraryZigzag()
        case "allgather":
            return LibraryAllGather()
    raise ValueError(f"no layout {name} in ring-flash-attn")


@dataclass(frozen=True)
class LibraryPlan:
    """Where sequences begin and end, as flash-attn wants it: of our queries, and of the keys that they meet."""

    queries: Tensor  # int32, one more than there are sequences
    keys: Tensor
    longest: tuple[int, int]  # of both
    gathered: slice  # where in the whole pack those keys lie

    def to(self, device: torch.device) -> LibraryPlan:
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))


class LibraryZigzag:
    """On a ring of one there is nothing to cut, and it is as the other."""

    name = "zigzag"

    def multiple(self, ring_size: int) -> int:
        return self.unit(ring_size)

    def unit(self, ring_size: int) -> int:
        return 2 * ring_size if ring_size > 1 else 1

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        if ring_size == 1:
            return LibraryAllGather().deal(segments, 1)
        places, real = [], []
        for rank in range(ring_size):
            chunks = [chunk for segment in segments for chunk in _chunks(segment, rank, ring_size)]
            places.append(torch.cat([torch.arange(chunk.start, chunk.stop) for _, chunk in chunks]))
            real.append(sum(len(_within(chunk, segment)) for segment, chunk in chunks))
        work = sum(seen(range(segment.padded)) for segment in segments) / ring_size
        return Deal(tuple(places), tuple(real), (work,) * ring_size)

    def plan(self, segments: Sequence[Segment], ring: Ring) -> LibraryPlan:
        if ring.size == 1:
            return LibraryAllGather().plan(segments, ring)
        assert all(segment.padded % self.unit(ring.size) == 0 for segment in segments)
        return _plan_of([segment.padded // ring.size for segment in segments])

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        plan, ring = cast("LibraryPlan", batch.plan), batch.ring
        q, k, v = _readable(q_tHD, k_tGD, v_tGD)
        if ring.size == 1:
            return _attend_alone(q, k, v, plan, scale)
        out: Tensor = functions().zigzag(
            q,
            k,
            v,
            plan.queries,
            plan.longest[0],
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            group=ring.group,
        )
        forth = (ring.size - 1) * (k.nbytes + v.nbytes)
        return _counted(out, ring, forth, forth + ring.size * SUMMED * (k.numel() + v.numel()))


class LibraryAllGather:
    name = "allgather"

    def multiple(self, ring_size: int) -> int:
        return ring_size

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        return 1

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        order = torch.cat([torch.arange(run.start, run.stop) for run in _runs(segments)])
        real, share = sum(segment.length for segment in segments), len(order) // ring_size
        held = [min(max(real - rank * share, 0), share) for rank in range(ring_size)]
        return Deal(order.split(share), tuple(held), tuple(_work(segments, share)))

    def plan(self, segments: Sequence[Segment], ring: Ring) -> LibraryPlan:
        whole = _plan_of([len(run) for run in _runs(segments)])
        if ring.size == 1:
            return whole
        queries, keys, *longest, gathered = functions().llama3_plan(whole.keys, True, ring.rank, ring.size)
        return LibraryPlan(queries, keys, (longest[0], longest[1]), gathered)

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        plan, ring = cast("LibraryPlan", batch.plan), batch.ring
        q, k, v = _readable(q_tHD, k_tGD, v_tGD)
        if ring.size == 1:
            return _attend_alone(q, k, v, plan, scale)
        out: Tensor = functions().llama3(
            q,
            k,
            v,
            plan.queries,
            plan.keys,
            *plan.longest,
            heads_k_stride=1,  # one head of keys at a time, as ours
            local_k_slice=plan.gathered,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            group=ring.group,
        )
        forth = (ring.size - 1) * (k.nbytes + v.nbytes)
        return _counted(out, ring, forth, 2 * forth)  # gathered again, and their gradients in the same dtype


def _attend_alone(q: Tensor, k: Tensor, v: Tensor, plan: LibraryPlan, scale: float) -> Tensor:
    """By flash-attn itself. The library would send to itself, or take the whole world for a group that is not there."""
    out: Tensor = functions().alone(
        q,
        k,
        v,
        plan.queries,
        plan.keys,
        *plan.longest,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _readable(*tensors: Tensor) -> Iterator[Tensor]:
    """flash-attn reads a head's elements as contiguous, and writes gradients in the strides of what they are of."""
    return (each if each.stride(-1) == 1 else each.contiguous() for each in tensors)


def _counted(out: Tensor, ring: Ring, forth: int, back: int) -> Tensor:
    """The library sends by itself; what, is known."""
    ring.traffic.sent += forth

    def count(_: Tensor) -> None:
        ring.traffic.sent += back

    if out.requires_grad:
        out.register_hook(count)
    return out


def _plan_of(lengths: Sequence[int]) -> LibraryPlan:
    bounds = torch.tensor([*accumulate(filter(None, lengths), initial=0)], dtype=torch.int32)
    return LibraryPlan(bounds, bounds, (max(lengths), max(lengths)), slice(sum(lengths)))


def _chunks(segment: Segment, rank: int, ring_size: int) -> Iterator[tuple[Segment, range]]:
    """The two that a rank holds of a segment, as places in the pack."""
    size = segment.padded // (2 * ring_size)
    for chunk in (rank, 2 * ring_size - 1 - rank):
        start = segment.start + chunk * size
        yield segment, range(start, start + size)


def _within(chunk: range, segment: Segment) -> range:
    """Of a chunk what is no padding."""
    return range(chunk.start, min(chunk.stop, max(chunk.start, segment.start + segment.length)))


def _runs(segments: Sequence[Segment]) -> list[range]:
    """The pack in the order in which it is cut: all real tokens, then what padding there is, each segment's own as a
    sequence of its own."""
    real = [range(s.start, s.start + s.length) for s in segments]
    padding = [range(s.start + s.length, s.start + s.padded) for s in segments]
    return [run for run in (*real, *padding) if run]


def _work(segments: Sequence[Segment], share: int) -> Iterator[float]:
    runs = [len(run) for run in _runs(segments)]
    starts = [*accumulate(runs, initial=0)]
    for first in range(0, starts[-1], share):
        pieces = (
            range(max(first - start, 0), min(first + share - start, length))
            for start, length in zip(starts, runs, strict=False)
        )
        yield float(sum(seen(piece) for piece in pieces if piece))
