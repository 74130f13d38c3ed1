"""Attention by rotation over a block kernel, shared by the rotating layouts.

Keys and values travel around the ring; the next block is in flight while the current one is computed. Outputs are
merged in float32 by log-sum-exp. In the backward pass dk and dv travel with their block and are summed in float32,
and every block is given the global output and log-sum-exp.

A block's queries are all of ours or those of our late chunks. Each of the two is selected once a layer, and has its own
running output and its own dq; they are put together at the end.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.alone import AlonePlan
from rlexp.training.ring.attention import Attention, Kept
from rlexp.training.ring.base import ALL, Deal, Layout, Part
from rlexp.training.ring.collectives import rotate
from rlexp.training.ring.cut import Cut
from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel, Call, Grads, Rows, accumulation_dtype
from rlexp.training.ring.kernels.fused import add_keys, merge_rows
from rlexp.training.ring.selection import Selection, add, parts_of, select
from rlexp.training.types import Segment


@dataclass(frozen=True)
class Block:
    """One call of a kernel: which of our queries meet which of the source's keys, and whether causally."""

    queries: Part
    keys: Part
    causal: bool


@dataclass(frozen=True)
class RotatingPlan(Attention):
    """Plan of a rotating layout: for each source rank our block with its keys, and the parts of its shard.

    Our own block comes first, and has all of our queries: every real token sees at least itself.
    """

    ring: Ring
    kernel: BlockKernel
    blocks: tuple[Block | None, ...]  # None where all keys of the source are later than our queries
    parts: tuple[dict[Part, Selection], ...]

    def to(self, device: torch.device) -> RotatingPlan:
        parts = tuple({part: selection.to(device) for part, selection in each.items()} for each in self.parts)
        there = replace(self, parts=parts)
        for source in range(self.ring.size):
            if (block := there.blocks[source]) is not None:
                call = there._call(source, block, 1.0)
                self.kernel.prepare(call.q_lengths, call.k_lengths, device)
        return there

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        ring = self.ring
        queries = {part: select(self.kernel.ready(q), rows) for part, rows in self._queries()}
        results: dict[Part, tuple[Tensor, Tensor]] = {}
        kv = own_kv = torch.stack((k, v))
        for step in range(ring.size):
            coming = rotate(kv, ring) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            if (block := self.blocks[source]) is not None:
                keys, values = self._keys(source, block, kv)
                computed = self.kernel.forward(queries[block.queries], keys, values, self._call(source, block, scale))
                if block.queries in results:
                    merge_rows(*results[block.queries], *computed)
                else:
                    results[block.queries] = (widened(computed[0]), computed[1])
            if coming is not None:
                kv = coming.wait()
        out, lse = self._joined(q, results)
        result = out.to(q.dtype)
        return result, (q, own_kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        q, kv, out, lse = kept
        ring = self.ring
        dkv = kv.new_zeros(kv.shape, dtype=accumulation_dtype(q.dtype))
        ours = [self.kernel.ready(x) for x in (dout, q, out)]
        parts = {part: tuple(select(x, rows) for x in (*ours, lse)) for part, rows in self._queries()}
        dqs: dict[Part, Tensor] = {}
        coming_dkv = None
        for step in range(ring.size):
            coming_kv = rotate(kv, ring) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            block, grads = self.blocks[source], None
            if block is not None:
                of_dout, of_q, of_out, of_lse = parts[block.queries]
                given = (of_dout, of_q, *self._keys(source, block, kv), of_out, of_lse)
                grads = self.kernel.backward(*given, self._call(source, block, scale))
                if block.queries in dqs:
                    dqs[block.queries].add_(grads[0])
                else:
                    dqs[block.queries] = widened(grads[0])
            # The sum of this block's gradient over the ranks before us arrives while we compute our part of it.
            if coming_dkv is not None:
                dkv = coming_dkv.wait()
            if block is not None and grads is not None:
                add_keys(dkv, self.parts[source][block.keys].index, *grads[1:])
            if ring.size > 1:
                coming_dkv = rotate(dkv, ring)
            if coming_kv is not None:
                kv = coming_kv.wait()
        if coming_dkv is not None:
            dkv = coming_dkv.wait()  # home again, after as many hops as the ring has ranks
        return self._summed(q, dqs), dkv[0], dkv[1]

    def _queries(self) -> Iterator[tuple[Part, Rows]]:
        """Yield each part of our queries that a block has, with its rows."""
        mine = self.parts[self.ring.rank]
        for part in dict.fromkeys(block.queries for block in self.blocks if block is not None):
            yield part, mine[part].index

    def _keys(self, source: int, block: Block, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the source that the block has."""
        rows = self.parts[source][block.keys].index
        keys, values = kv[:, rows] if isinstance(rows, slice) else kv.index_select(1, rows)
        return keys, values

    def _call(self, source: int, block: Block, scale: float) -> Call:
        queries, keys = self.parts[self.ring.rank][block.queries], self.parts[source][block.keys]
        return Call(queries.lengths, keys.lengths, causal=block.causal, scale=scale)

    def _joined(self, q: Tensor, results: dict[Part, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Lay the outputs of all queries where the shard has them, and merge those of its parts in."""
        whole_out, whole_lse = results.pop(ALL)
        rows = self.parts[self.ring.rank][ALL].index
        if len(whole_out) == len(q) and isinstance(rows, slice):
            out, lse = whole_out, whole_lse
        else:
            out, lse = empty_output(q)
            out[rows], lse[rows] = whole_out, whole_lse
        for part, result in results.items():
            merge(out, lse, *result, self.parts[self.ring.rank][part].index)
        return out, lse

    def _summed(self, q: Tensor, dqs: dict[Part, Tensor]) -> Tensor:
        whole = dqs.pop(ALL)
        rows = self.parts[self.ring.rank][ALL].index
        if len(whole) == len(q) and isinstance(rows, slice):
            dq = whole
        else:
            dq = q.new_zeros(q.shape, dtype=whole.dtype)
            dq[rows] = whole
        for part, dq_part in dqs.items():
            add(dq, self.parts[self.ring.rank][part].index, dq_part)
        return dq


class Rotating(Layout):
    """A layout that attends by rotation. A subclass says how a pack is cut, and the block of each pair of ranks."""

    @abstractmethod
    def cut(self, segments: Sequence[Segment], ring_size: int) -> Cut: ...

    @abstractmethod
    def block(self, rank: int, source: int, ring_size: int) -> Block | None:
        """Say how the queries of `rank` attend to the keys of `source`; None if all keys are later than they are."""

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        return self.cut(segments, ring_size).deal()

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> RotatingPlan | AlonePlan:
        cut, sources = self.cut(segments, ring.size), range(ring.size)
        if ring.size == 1:
            return AlonePlan(kernel, parts_of(cut, 0)[ALL])
        blocks = tuple(self.block(ring.rank, source, ring.size) for source in sources)
        return RotatingPlan(ring, kernel, blocks, tuple(parts_of(cut, source) for source in sources))


def widened(x: Tensor) -> Tensor:
    """Return the first summand of a sum in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype))


def empty_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the running output and log-sum-exp before any block."""
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, rows: Rows) -> None:
    """Merge a block into these rows of the running output and log-sum-exp, which are finite there."""
    if isinstance(rows, slice):
        merge_rows(out[rows], lse[rows], block_out, block_lse)
        return
    known_out, known_lse = out.index_select(0, rows), lse.index_select(0, rows)
    merge_rows(known_out, known_lse, block_out, block_lse)
    out.index_copy_(0, rows, known_out)
    lse.index_copy_(0, rows, known_lse)
