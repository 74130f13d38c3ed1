"""Attention by rotation, over a block kernel: what the rotating layouts share.

Keys and values travel around the ring; the next block is in flight while the current one is computed. Outputs are
merged in float32 by log-sum-exp; in the backward pass dk and dv travel with their block and are added up in
float32, and every block is given the global output and log-sum-exp.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rlexp.ring.collectives import rotate
from rlexp.ring.cut import Cut
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import accumulation_dtype, merge_rows
from rlexp.ring.layout import Block, Deal, Grads, Kept, Part, differentiable
from rlexp.ring.selection import Selection, parts_of
from rlexp.types import Segment

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch


@dataclass(frozen=True)
class RotatingPlan:
    """By source rank, where the tokens of each of its parts lie in its shard."""

    parts: tuple[dict[Part, Selection], ...]

    def to(self, device: torch.device) -> RotatingPlan:
        return RotatingPlan(tuple({part: at.to(device) for part, at in parts.items()} for parts in self.parts))


class Rotating:
    """A layout that says how a pack is cut, and which block there is for each pair of ranks, attends so."""

    name: str

    def cut(self, segments: Sequence[Segment], ring_size: int) -> Cut:
        raise NotImplementedError

    def block(self, rank: int, source: int, ring_size: int) -> Block | None:
        """How our queries attend to the keys of `source`; None if they are all later than ours."""
        raise NotImplementedError

    def multiple(self, ring_size: int) -> int:
        return ring_size

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        return 1

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        return deal_of(self.cut(segments, ring_size))

    def plan(self, segments: Sequence[Segment], ring: Ring) -> RotatingPlan:
        found = self.cut(segments, ring.size)
        return RotatingPlan(tuple(parts_of(found, rank) for rank in range(ring.size)))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        return differentiable(self, q_tHD, k_tGD, v_tGD, batch, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: RingBatch, scale: float) -> tuple[Tensor, Kept]:
        ring = batch.ring
        out, lse = empty_output(q)
        queries = batch.kernel.ready(q)
        kv = own_kv = torch.stack((k, v))
        for step in range(ring.size):
            coming = rotate(kv, ring) if step + 1 < ring.size else None
            forward_block(batch, ring.rank, (ring.rank - step) % ring.size, queries, kv, out, lse, scale)
            if coming is not None:
                kv = coming.wait()
        result = out.to(q.dtype)
        return result, (q, own_kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, batch: RingBatch, scale: float) -> Grads:
        q, kv, out, lse = kept
        ring, dtype = batch.ring, accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        dout, q, out = (batch.kernel.ready(x) for x in (dout, q, out))
        coming_dkv = None
        for step in range(ring.size):
            coming_kv = rotate(kv, ring) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            added = backward_block(batch, ring.rank, source, dout, q, kv, out, lse, dq, scale)
            # What the ranks before us have added to this block's gradient arrives while we compute ours.
            if coming_dkv is not None:
                dkv = coming_dkv.wait()
            if added is not None:
                at, dk_block, dv_block = added
                add(dkv[0], at, dk_block)
                add(dkv[1], at, dv_block)
            if ring.size > 1:
                coming_dkv = rotate(dkv, ring)
            if coming_kv is not None:
                kv = coming_kv.wait()
        if coming_dkv is not None:
            dkv = coming_dkv.wait()  # home again, after as many hops as the ring has ranks
        return dq, dkv[0], dkv[1]


def deal_of(found: Cut) -> Deal:
    """Of a layout on whose ranks the queries of the cut attend, with all their heads."""
    ranks = range(found.ring_size)
    return Deal(found.places(), tuple(map(found.real, ranks)), tuple(float(found.work(rank)) for rank in ranks))


def rotating(batch: RingBatch) -> tuple[Rotating, RotatingPlan]:
    return cast("Rotating", batch.layout), cast("RotatingPlan", batch.plan)


def empty_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """The running output and log-sum-exp before any block."""
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def forward_block(
    batch: RingBatch, rank: int, source: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Let the queries of `rank` attend to the keys of `source`, and merge what comes of it into `out` and `lse`."""
    layout, plan = rotating(batch)
    block = layout.block(rank, source, len(plan.parts))
    if block is None:
        return
    queries, keys = plan.parts[rank][block.queries], plan.parts[source][block.keys]
    block_out, block_lse = batch.kernel.forward(
        select(q, queries.index),
        select(kv[0], keys.index),
        select(kv[1], keys.index),
        queries.lengths,
        keys.lengths,
        causal=block.causal,
        scale=scale,
    )
    merge(out, lse, block_out, block_lse, queries.index, first=rank == source)


def backward_block(
    batch: RingBatch,
    rank: int,
    source: int,
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    scale: float,
) -> tuple[slice | Tensor, Tensor, Tensor] | None:
    """Add the block's part to `dq`; its parts of dk and dv, with the places of the source's tokens they are of."""
    layout, plan = rotating(batch)
    block = layout.block(rank, source, len(plan.parts))
    if block is None:
        return None
    queries, keys = plan.parts[rank][block.queries], plan.parts[source][block.keys]
    at = queries.index
    dq_block, dk_block, dv_block = batch.kernel.backward(
        select(dout, at),
        select(q, at),
        select(kv[0], keys.index),
        select(kv[1], keys.index),
        select(out, at),
        select(lse, at),
        queries.lengths,
        keys.lengths,
        causal=block.causal,
        scale=scale,
    )
    add(dq, at, dq_block)
    return keys.index, dk_block, dv_block


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, at: slice | Tensor, *, first: bool) -> None:
    """Add a block to the rows `at` of the running output.

    The first block is our own, in which every real token sees at least itself; so the running log-sum-exp is
    finite from then on.
    """
    if first:
        out[at], lse[at] = block_out, block_lse
        return
    if isinstance(at, slice):
        merge_rows(out[at], lse[at], block_out, block_lse)
        return
    rows, known = out.index_select(0, at), lse.index_select(0, at)
    merge_rows(rows, known, block_out, block_lse)
    out.index_copy_(0, at, rows)
    lse.index_copy_(0, at, known)


def select(x: Tensor, at: slice | Tensor) -> Tensor:
    return x[at] if isinstance(at, slice) else x.index_select(0, at)


def add(into: Tensor, at: slice | Tensor, added: Tensor) -> None:
    """To rows of which each is there once."""
    if isinstance(at, slice):
        into[at] += added
    else:
        into.index_add_(0, at, added)
