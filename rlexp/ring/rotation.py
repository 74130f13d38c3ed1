"""Attention by rotation, one autograd function over a block kernel: what the rotating layouts share.

Keys and values travel around the ring; the next block is in flight while the current one is computed. Outputs are
merged in float32 by log-sum-exp; in the backward pass dk and dv travel with their block and are added up in
float32, and every block is given the global output and log-sum-exp.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rlexp.ring.collectives import rotate
from rlexp.ring.kernels.base import accumulation_dtype

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch
    from rlexp.ring.layouts.base import RotatingLayout


class Rotating:
    """A layout that answers `block` for each pair of ranks attends so."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        out: Tensor = _RingAttention.apply(q_tHD, k_tGD, v_tGD, batch, scale)
        return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: RingBatch, scale: float) -> Tensor:
        ring = batch.ring
        out, lse = empty_output(q)
        kv = own_kv = torch.stack((k, v))
        for step in range(ring.size):
            coming = rotate(kv, ring) if step + 1 < ring.size else None
            forward_block(batch, ring.rank, (ring.rank - step) % ring.size, q, kv, out, lse, scale)
            if coming is not None:
                kv = coming.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, own_kv, result, lse)
        ctx.batch, ctx.scale = batch, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        batch, ring = ctx.batch, ctx.batch.ring
        dtype = accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        coming_dkv = None
        for step in range(ring.size):
            coming_kv = rotate(kv, ring) if step + 1 < ring.size else None
            source = (ring.rank - step) % ring.size
            added = backward_block(batch, ring.rank, source, grads[0], q, kv, out, lse, dq, ctx.scale)
            # What the ranks before us have added to this block's gradient arrives while we compute ours.
            if coming_dkv is not None:
                dkv = coming_dkv.wait()
            if added is not None:
                at, dk_block, dv_block = added
                dkv[0][at] += dk_block
                dkv[1][at] += dv_block
            if ring.size > 1:
                coming_dkv = rotate(dkv, ring)
            if coming_kv is not None:
                kv = coming_kv.wait()
        if coming_dkv is not None:
            dkv = coming_dkv.wait()  # home again, after as many hops as the ring has ranks
        return dq.to(q.dtype), dkv[0].to(kv.dtype), dkv[1].to(kv.dtype), None, None


def rotating(batch: RingBatch) -> RotatingLayout:
    return cast("RotatingLayout", batch.layout)


def empty_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """The running output and log-sum-exp before any block."""
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def forward_block(
    batch: RingBatch, rank: int, source: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """Let the queries of `rank` attend to the keys of `source`, and merge what comes of it into `out` and `lse`."""
    block = rotating(batch).block(rank, source, len(batch.parts))
    if block is None:
        return
    queries, keys = batch.parts[rank][block.queries], batch.parts[source][block.keys]
    block_out, block_lse = batch.kernel.forward(
        q[queries.index],
        kv[0][keys.index],
        kv[1][keys.index],
        queries.lengths,
        keys.lengths,
        causal=block.causal,
        scale=scale,
    )
    _merge(out, lse, block_out, block_lse, queries.index, first=rank == source)


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
    block = rotating(batch).block(rank, source, len(batch.parts))
    if block is None:
        return None
    queries, keys = batch.parts[rank][block.queries], batch.parts[source][block.keys]
    at = queries.index
    dq_block, dk_block, dv_block = batch.kernel.backward(
        dout[at],
        q[at],
        kv[0][keys.index],
        kv[1][keys.index],
        out[at],
        lse[at],
        queries.lengths,
        keys.lengths,
        causal=block.causal,
        scale=scale,
    )
    dq[at] += dq_block
    return keys.index, dk_block, dv_block


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, at: slice | Tensor, *, first: bool) -> None:
    """Add a block to the rows `at` of the running output, weighting both by their share of the softmax sum.

    The first block is our own, in which every real token sees at least itself; so the running log-sum-exp is
    finite from then on, and a block without keys (−inf) adds nothing.
    """
    if first:
        out[at], lse[at] = block_out, block_lse
        return
    before = lse[at]
    after = torch.logaddexp(before, block_lse)
    out[at] = out[at] * (before - after).exp().unsqueeze(-1) + block_out * (block_lse - after).exp().unsqueeze(-1)
    lse[at] = after
