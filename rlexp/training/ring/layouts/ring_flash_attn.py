"""The library ring-flash-attn in place of our own rings: its zigzag, and its llama3 functions as `allgather`.

In both flash-attn attends, in bfloat16 alone. They hold and compute something else than our layouts of the same names:

    zigzag     every segment is cut into 2 × ring equal chunks, so each is padded to a multiple of that. flash-attn
               does not know of the padding and computes it, without effect: no real token sees it
    allgather  the pack, with its padding at the end, is cut into as many equal pieces as the ring has ranks. So the
               rank with the end of a long sequence computes the most. The gradients of keys and values are summed over
               the ring in bfloat16; ours are summed in float32

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.base import Deal, Layout
from rlexp.training.ring.cut import seen
from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.past_adapter import functions
from rlexp.training.types import Segment

SUMMED = 4  # bytes of an element of dk and dv on their way around the library's zigzag


def library_layout(name: str) -> Layout:
    match name:
        case "zigzag":
            return LibraryZigzag()
        case "allgather":
            return LibraryAllGather()
    raise ValueError(f"no layout {name} in ring-flash-attn")


@dataclass(frozen=True)
class Bounds:
    """Bounds of sequences in flash-attn's form, for our queries and for the keys that they meet."""

    queries: Tensor  # int32, one more than there are sequences
    keys: Tensor
    longest: tuple[int, int]  # of the queries, and of the keys

    def to(self, device: torch.device) -> Bounds:
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))


@dataclass(frozen=True)
class LibraryPlan(ABC):
    """Attention by flash-attn, and the bytes that the library sends for it by itself."""

    ring: Ring
    bounds: Bounds

    def to(self, device: torch.device) -> LibraryPlan:
        return replace(self, bounds=self.bounds.to(device))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, scale: float) -> Tensor:
        q, k, v = _readable(q_tHD, k_tGD, v_tGD)
        deterministic = torch.are_deterministic_algorithms_enabled()
        out: Tensor = self.call(q, k, v, {"softmax_scale": scale, "causal": True, "deterministic": deterministic})
        forth, back = self.sent(k, v)
        self._count(forth)
        if out.requires_grad:
            out.register_hook(lambda _: self._count(back))
        return out

    @abstractmethod
    def call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor: ...

    @abstractmethod
    def sent(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        """Return the bytes that this rank sends in the forward and in the backward pass."""

    def _count(self, sent: int) -> None:
        self.ring.traffic.arrived(self.ring.traffic.send(sent))


class AlonePlan(LibraryPlan):
    """Attention on a ring of one, by flash-attn itself.

    The library would send to itself, or take the whole world for the missing group.
    """

    def call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor = functions().alone(q, k, v, self.bounds.queries, self.bounds.keys, *self.bounds.longest, **options)
        return out

    def sent(self, k: Tensor, v: Tensor) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0


class ZigzagPlan(LibraryPlan):
    def call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        bounds, group = self.bounds, self.ring.group
        out: Tensor = functions().zigzag(q, k, v, bounds.queries, bounds.longest[0], group=group, **options)
        return out

    def sent(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        forth = (self.ring.size - 1) * (k.nbytes + v.nbytes)
        return forth, forth + self.ring.size * SUMMED * (k.numel() + v.numel())


@dataclass(frozen=True)
class AllGatherPlan(LibraryPlan):
    gathered: slice  # where our keys lie in the whole pack

    def call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor = functions().llama3(
            q,
            k,
            v,
            self.bounds.queries,
            self.bounds.keys,
            *self.bounds.longest,
            heads_k_stride=1,  # one key/value head at a time, like ours
            local_k_slice=self.gathered,
            group=self.ring.group,
            **options,
        )
        return out

    def sent(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        forth = (self.ring.size - 1) * (k.nbytes + v.nbytes)
        return forth, 2 * forth  # gathered again, and their gradients in the same dtype


class LibraryZigzag(Layout):
    """The library's zigzag. On a ring of one there is nothing to cut, and it is `LibraryAllGather`."""

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

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> LibraryPlan:
        if ring.size == 1:
            return LibraryAllGather().plan(segments, ring, kernel)
        assert all(segment.padded % self.unit(ring.size) == 0 for segment in segments)
        return ZigzagPlan(ring, _bounds_of([segment.padded // ring.size for segment in segments]))


class LibraryAllGather(Layout):
    name = "allgather"

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        order = torch.cat([torch.arange(run.start, run.stop) for run in _runs(segments)])
        real, share = sum(segment.length for segment in segments), len(order) // ring_size
        held = [min(max(real - rank * share, 0), share) for rank in range(ring_size)]
        return Deal(order.split(share), tuple(held), tuple(_work(segments, share)))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> LibraryPlan:  # noqa: ARG002
        whole = _bounds_of([len(run) for run in _runs(segments)])
        if ring.size == 1:
            return AlonePlan(ring, whole)
        queries, keys, *longest, gathered = functions().llama3_plan(whole.keys, True, ring.rank, ring.size)
        return AllGatherPlan(ring, Bounds(queries, keys, (longest[0], longest[1])), gathered)


def _readable(*tensors: Tensor) -> Iterator[Tensor]:
    """Make each head's elements contiguous, as flash-attn reads them; it writes gradients in its inputs' strides."""
    return (each if each.stride(-1) == 1 else each.contiguous() for each in tensors)


def _bounds_of(lengths: Sequence[int]) -> Bounds:
    bounds = torch.tensor([*accumulate(filter(None, lengths), initial=0)], dtype=torch.int32)
    return Bounds(bounds, bounds, (max(lengths), max(lengths)))


def _chunks(segment: Segment, rank: int, ring_size: int) -> Iterator[tuple[Segment, range]]:
    """Yield the segment with each of the two chunks that the rank holds of it, as places in the pack."""
    size = segment.padded // (2 * ring_size)
    for chunk in (rank, 2 * ring_size - 1 - rank):
        start = segment.start + chunk * size
        yield segment, range(start, start + size)


def _within(chunk: range, segment: Segment) -> range:
    """Return the part of a chunk that is not padding."""
    return range(chunk.start, min(chunk.stop, max(chunk.start, segment.start + segment.length)))


def _runs(segments: Sequence[Segment]) -> list[range]:
    """Return the pack in the order in which it is cut: all real tokens, then each segment's padding as a sequence."""
    real = [range(s.start, s.start + s.length) for s in segments]
    padding = [range(s.start + s.length, s.start + s.padded) for s in segments]
    return [run for run in (*real, *padding) if run]


def _work(segments: Sequence[Segment], share: int) -> Iterator[float]:
    """Yield each rank's query-key pairs."""
    runs = [len(run) for run in _runs(segments)]
    starts = [*accumulate(runs, initial=0)]
    for first in range(0, starts[-1], share):
        pieces = (
            range(max(first - start, 0), min(first + share - start, length))
            for start, length in zip(starts, runs, strict=False)
        )
        yield float(sum(seen(piece) for piece in pieces if piece))
