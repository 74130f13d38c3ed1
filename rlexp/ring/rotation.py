"""Attention by rotation over a block kernel, shared by the rotating layouts.

Keys and values travel around the ring; the next block is in flight while the current one is computed. Outputs are
merged in float32 by log-sum-exp. In the backward pass dk and dv travel with their block and are summed in float32,
and every block is given the global output and log-sum-exp.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.ring.attention import Attention, Kept
from rlexp.ring.collectives import rotate
from rlexp.ring.cut import Cut
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel, Call, Grads, Rows, accumulation_dtype, merge_rows
from rlexp.ring.layout import Deal, Layout, Part
from rlexp.ring.selection import Selection, add, parts_of, select
from rlexp.types import Segment


@dataclass(frozen=True)
class Block:
    """One call of a kernel: which of our queries meet which of the source's keys, and whether causally."""

    queries: Part
    keys: Part
    causal: bool


@dataclass(frozen=True)
class RotatingPlan(Attention):
    """Plan of a rotating layout: for each source rank our block with its keys, and the parts of its shard."""

    ring: Ring
    kernel: BlockKernel
    blocks: tuple[Block | None, ...]  # None where all keys of the source are later than our queries
    parts: tuple[dict[Part, Selection], ...]

    def to(self, device: torch.device) -> RotatingPlan:
        parts = tuple({part: selection.to(device) for part, selection in each.items()} for each in self.parts)
        there = replace(self, parts=parts)
        for source in range(self.ring.size):
            if (block := there._call(source, 1.0)) is not None:
                self.kernel.prepare(block[2].q_lengths, block[2].k_lengths, device)
        return there

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        ring = self.ring
        out, lse = empty_output(q)
        queries = self.kernel.ready(q)
        kv = own_kv = torch.stack((k, v))
        for step in range(ring.size):
            coming = rotate(kv, ring) if step + 1 < ring.size else None
            self._forward_block((ring.rank - step) % ring.size, queries, kv, out, lse, scale)
            if coming is not None:
                kv = coming.wait()
        result = out.to(q.dtype)
        return result, (q, own_kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        q, kv, out, lse = kept
        ring, dtype = self.ring, accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        dout, q, out = (self.kernel.ready(x) for x in (dout, q, out))
        coming_dkv = None
        for step in range(ring.size):
            coming_kv = rotate(kv, ring) if step + 1 < ring.size else None
            block = self._backward_block((ring.rank - step) % ring.size, kv, (dout, q, out, lse), dq, scale)
            # The sum of this block's gradient over the ranks before us arrives while we compute our part of it.
            if coming_dkv is not None:
                dkv = coming_dkv.wait()
            if block is not None:
                keys, dk_block, dv_block = block
                add(dkv[0], keys, dk_block)
                add(dkv[1], keys, dv_block)
            if ring.size > 1:
                coming_dkv = rotate(dkv, ring)
            if coming_kv is not None:
                kv = coming_kv.wait()
        if coming_dkv is not None:
            dkv = coming_dkv.wait()  # home again, after as many hops as the ring has ranks
        return dq, dkv[0], dkv[1]

    def _forward_block(self, source: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        """Let our queries attend to the keys of `source`, and merge the result into `out` and `lse`."""
        block = self._call(source, scale)
        if block is None:
            return
        at, keys, call = block
        computed = self.kernel.forward(select(q, at), select(kv[0], keys), select(kv[1], keys), call)
        merge(out, lse, *computed, at, first=source == self.ring.rank)

    def _backward_block(
        self, source: int, kv: Tensor, ours: tuple[Tensor, Tensor, Tensor, Tensor], dq: Tensor, scale: float
    ) -> tuple[Rows, Tensor, Tensor] | None:
        """Add the block's part to `dq`. Return the rows of the source's keys, and the block's part of dk and dv there.

        `ours` are dout, q, out and the log-sum-exp of our queries.
        """
        block = self._call(source, scale)
        if block is None:
            return None
        at, keys, call = block
        dout, q, out, lse = (select(x, at) for x in ours)
        k, v = select(kv[0], keys), select(kv[1], keys)
        dq_block, dk_block, dv_block = self.kernel.backward(dout, q, k, v, out, lse, call)
        add(dq, at, dq_block)
        return keys, dk_block, dv_block

    def _call(self, source: int, scale: float) -> tuple[Rows, Rows, Call] | None:
        """Return the rows of our queries, the rows of the source's keys, and the kernel's call over both."""
        block = self.blocks[source]
        if block is None:
            return None
        queries, keys = self.parts[self.ring.rank][block.queries], self.parts[source][block.keys]
        call = Call(queries.lengths, keys.lengths, causal=block.causal, scale=scale)
        return queries.index, keys.index, call


class Rotating(Layout):
    """A layout that attends by rotation. A subclass says how a pack is cut, and the block of each pair of ranks."""

    @abstractmethod
    def cut(self, segments: Sequence[Segment], ring_size: int) -> Cut: ...

    @abstractmethod
    def block(self, rank: int, source: int, ring_size: int) -> Block | None:
        """Say how the queries of `rank` attend to the keys of `source`; None if all keys are later than they are."""

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        return self.cut(segments, ring_size).deal()

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> RotatingPlan:
        cut, sources = self.cut(segments, ring.size), range(ring.size)
        blocks = tuple(self.block(ring.rank, source, ring.size) for source in sources)
        return RotatingPlan(ring, kernel, blocks, tuple(parts_of(cut, source) for source in sources))


def empty_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the running output and log-sum-exp before any block."""
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, rows: Rows, *, first: bool) -> None:
    """Merge a block into these rows of the running output and log-sum-exp.

    The first block is our own, in which every real token sees at least itself; so the running log-sum-exp is
    finite from then on.
    """
    if first:
        out[rows], lse[rows] = block_out, block_lse
        return
    if isinstance(rows, slice):
        merge_rows(out[rows], lse[rows], block_out, block_lse)
        return
    known_out, known_lse = out.index_select(0, rows), lse.index_select(0, rows)
    merge_rows(known_out, known_lse, block_out, block_lse)
    out.index_copy_(0, rows, known_out)
    lse.index_copy_(0, rows, known_lse)
