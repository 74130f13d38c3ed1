"""All-gather: every rank is given all keys and values, one head at a time, and attends with its own queries.

Tokens are held as in zigzag, so that every rank has the same work:

    ring 4   chunk  0 1 2 3 4 5 6 7
             rank   0 1 2 3 3 2 1 0

A rank's own keys are attended to while the others' arrive, and then all that come before its chunks in one call: two
calls and one merge, whatever the size of the ring. One head of keys is there at a time, and the next one on its way.
In the backward pass keys and values are gathered again; their gradients are summed up where they belong, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rlexp.ring.collectives import Pending, gather, sum_and_scatter
from rlexp.ring.cut import Cut
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import accumulation_dtype
from rlexp.ring.layout import ALL, Deal, Grads, Kept, differentiable
from rlexp.ring.layouts.zigzag import zigzag
from rlexp.ring.rotation import deal_of, empty_output, merge
from rlexp.ring.selection import Selection, parts_of
from rlexp.types import Segment

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch


@dataclass(frozen=True)
class GatheringPlan:
    """Our tokens; and for each of our chunks the keys before it that are not ours, by their places in what arrives."""

    own: Selection
    chunks: tuple[int, ...]  # real tokens of each
    before: Selection  # of as many lengths as there are chunks

    def to(self, device: torch.device) -> GatheringPlan:
        return GatheringPlan(self.own.to(device), self.chunks, self.before.to(device))


class AllGather:
    name = "allgather"

    def multiple(self, ring_size: int) -> int:
        return ring_size

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        return 1

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        return deal_of(zigzag(segments, ring_size))

    def plan(self, segments: Sequence[Segment], ring: Ring) -> GatheringPlan:
        found = zigzag(segments, ring.size)
        own = found.chunks[ring.rank]
        lengths = tuple(len(chunk) for chunks in own for chunk in chunks)
        return GatheringPlan(parts_of(found, ring.rank)[ALL], lengths, keys_before(found, ring.rank))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        return differentiable(self, q_tHD, k_tGD, v_tGD, batch, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: RingBatch, scale: float) -> tuple[Tensor, Kept]:
        plan, kernel, own = gathering(batch), batch.kernel, gathering(batch).own
        out, lse = empty_output(q)
        kv = torch.stack((k, v), dim=2).transpose(0, 1).contiguous()  # (G, t, 2, D)
        queries = kernel.ready(q)
        for ours, mine, arrived in heads_of(q, kv, batch):
            at = (own.index, ours)
            keys, values = both(mine[own.index])
            block = kernel.forward(queries[at], keys, values, own.lengths, own.lengths, causal=True, scale=scale)
            merge(out[:, ours], lse[:, ours], *block, own.index, first=True)
            keys, values = both(arrived.wait().flatten(0, 1)[plan.before.index])
            block = kernel.forward(
                queries[at], keys, values, plan.chunks, plan.before.lengths, causal=False, scale=scale
            )
            merge(out[:, ours], lse[:, ours], *block, own.index, first=False)
        result = out.to(q.dtype)
        return result, (q, kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, batch: RingBatch, scale: float) -> Grads:
        q, kv, out, lse = kept
        plan, kernel, own = gathering(batch), batch.kernel, gathering(batch).own
        dtype = accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        dout, q, out = (kernel.ready(x) for x in (dout, q, out))
        before = cast("Tensor", plan.before.index)
        going: list[Pending] = []
        for head, (ours, mine, arrived) in enumerate(heads_of(q, kv, batch)):
            at = (own.index, ours)
            known = (out[at], lse[at])
            keys, values = both(mine[own.index])
            dq_own, *dkv_own = kernel.backward(
                dout[at], q[at], keys, values, *known, own.lengths, own.lengths, causal=True, scale=scale
            )
            dkv[head][own.index] = torch.cat(dkv_own, dim=1)
            keys, values = both(arrived.wait().flatten(0, 1)[before])
            dq_before, *dkv_before = kernel.backward(
                dout[at], q[at], keys, values, *known, plan.chunks, plan.before.lengths, causal=False, scale=scale
            )
            dq[at] = dq_own + dq_before
            # A key may come before both of our chunks.
            spread = dkv.new_zeros(batch.ring.size, *mine.shape)
            spread.flatten(0, 1).index_add_(0, before, torch.cat(dkv_before, 1))
            if going:  # one at a time: what is spread is as long as the whole pack
                dkv[head - 1] += going.pop().wait()
            going.append(sum_and_scatter(spread, batch.ring))
        dkv[-1] += going.pop().wait()
        dk, dv = dkv.transpose(0, 1).unbind(2)
        return dq, dk, dv


def heads_of(q: Tensor, kv: Tensor, batch: RingBatch) -> Iterator[tuple[slice, Tensor, Pending]]:
    """For each head of keys the heads of queries that it serves, our keys and values, and, on their way, all ranks'."""
    serves = q.shape[1] // len(kv)
    coming = gather(kv[0], batch.ring)
    for head, mine in enumerate(kv):
        arrived = coming
        if head + 1 < len(kv):
            coming = gather(kv[head + 1], batch.ring)
        yield slice(head * serves, (head + 1) * serves), mine, arrived


def both(kv_k2D: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one head, (k, 1, D) each."""
    return kv_k2D[:, :1], kv_k2D[:, 1:]


def gathering(batch: RingBatch) -> GatheringPlan:
    return cast("GatheringPlan", batch.plan)


def keys_before(found: Cut, rank: int) -> Selection:
    """For each chunk of the rank the positions before it that are not its own, in (rank, place in its shard) order."""
    places = found.places()
    where = torch.cat(places).argsort()  # of each place of the pack, the one among all that are gathered
    index, lengths = [torch.zeros(0, dtype=torch.int64)], []
    for segment, chunks in zip(found.segments, found.chunks[rank], strict=True):
        for number, chunk in enumerate(chunks):
            first = chunks[0]
            earlier = [range(first.start), range(first.stop, chunk.start)] if number else [range(chunk.start)]
            index += [where[segment.start + each.start : segment.start + each.stop] for each in earlier]
            lengths.append(sum(len(each) for each in earlier))
    return Selection(torch.cat(index), tuple(lengths))
