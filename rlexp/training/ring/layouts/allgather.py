"""All-gather: every rank receives all keys and values, one head at a time, and attends with its own queries.

Tokens are held as in zigzag, so that every rank has the same work:

    ring 4   chunk  0 1 2 3 4 5 6 7
             rank   0 1 2 3 3 2 1 0

A rank attends to its own keys while the others' arrive, and then in one call to all keys that come before its chunks:
two calls and one merge, whatever the size of the ring. One gathered key/value head is held at a time, and the next one
is in flight. The backward pass gathers keys and values again; their gradients are summed in float32 on the rank that
holds the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.attention import Attention, Kept
from rlexp.training.ring.base import ALL, Deal, Layout
from rlexp.training.ring.collectives import Pending, gather, sum_and_scatter
from rlexp.training.ring.cut import Cut
from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel, Call, Grads, accumulation_dtype
from rlexp.training.ring.kernels.fused import merge_rows
from rlexp.training.ring.layouts.zigzag import zigzag
from rlexp.training.ring.rotation import empty_output, widened
from rlexp.training.ring.selection import Selection, add, parts_of, select
from rlexp.training.types import Segment, moved


class AllGather(Layout):
    name = "allgather"

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        return zigzag(segments, ring_size).deal()

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> GatheringPlan:
        cut = zigzag(segments, ring.size)
        chunks = tuple(len(chunk) for chunks in cut.chunks[ring.rank] for chunk in chunks)
        return GatheringPlan(ring, kernel, parts_of(cut, ring.rank)[ALL], chunks, *keys_before(cut, ring.rank))


@dataclass(frozen=True)
class GatheringPlan(Attention):
    """Our tokens, and for each of our chunks the earlier keys of other ranks, by their places in the gathered keys."""

    ring: Ring
    kernel: BlockKernel
    own: Selection
    chunks: tuple[int, ...]  # real tokens of each
    before: Tensor
    before_lengths: tuple[int, ...]  # one for each chunk

    def to(self, device: torch.device) -> GatheringPlan:
        for call in self._calls(1.0):
            self.kernel.prepare(call.q_lengths, call.k_lengths, device)
        return replace(self, own=self.own.to(device), before=moved(self.before, device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        rows = self.own.index
        kv = torch.stack((k, v), dim=2).transpose(0, 1).contiguous()  # (G, t, 2, D)
        queries, own = select(self.kernel.ready(q), rows), self._own(kv)
        to_own, to_earlier = self._calls(scale)
        results = []
        for head, (heads, arriving) in enumerate(self._heads(q, kv)):
            out_h, lse_h = self.kernel.forward(queries[:, heads], *both(own[head]), to_own)
            out_h = widened(out_h)
            block = self.kernel.forward(queries[:, heads], *both(self._earlier(arriving)), to_earlier)
            merge_rows(out_h, lse_h, *block)
            results.append((out_h, lse_h))
        out, lse = empty_output(q)
        out[rows], lse[rows] = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
        result = out.to(q.dtype)
        return result, (q, kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        q, kv, out, lse = kept
        rows, dtype = self.own.index, accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        dout, q, out = (select(self.kernel.ready(x), rows) for x in (dout, q, out))
        lse, own = select(lse, rows), self._own(kv)
        to_own, to_earlier = self._calls(scale)
        going: list[Pending] = []
        dqs, own_dkvs = [], []
        for head, (heads, arriving) in enumerate(self._heads(q, kv)):
            given, known = (dout[:, heads], q[:, heads]), (out[:, heads], lse[:, heads])
            dq_own, *dkv_own = self.kernel.backward(*given, *both(own[head]), *known, to_own)
            own_dkvs.append(torch.cat(dkv_own, dim=1))
            keys = both(self._earlier(arriving))
            dq_before, *dkv_before = self.kernel.backward(*given, *keys, *known, to_earlier)
            dqs.append(widened(dq_own).add_(dq_before))
            # A key may come before both of our chunks.
            spread = dkv.new_zeros(self.ring.size, *kv.shape[1:])
            spread.flatten(0, 1).index_add_(0, self.before, torch.cat(dkv_before, 1).to(dtype))
            if going:  # one at a time: the spread gradient is as long as the whole pack
                dkv[head - 1] += going.pop().wait()
            going.append(sum_and_scatter(spread, self.ring))
        dkv[-1] += going.pop().wait()
        dq[rows] = torch.cat(dqs, dim=1)
        add(dkv.transpose(0, 1), rows, torch.stack(own_dkvs, dim=1))
        dk, dv = dkv.transpose(0, 1).unbind(2)
        return dq, dk, dv

    def _own(self, kv_Gt2D: Tensor) -> Tensor:
        """Return our keys and values, segment by segment."""
        rows = self.own.index
        return kv_Gt2D[:, rows] if isinstance(rows, slice) else kv_Gt2D.index_select(1, rows)

    def _calls(self, scale: float) -> tuple[Call, Call]:
        """Return the kernel's calls over our own keys, and over the earlier keys of other ranks."""
        own = self.own.lengths
        return Call(own, own, causal=True, scale=scale), Call(self.chunks, self.before_lengths, False, scale)

    def _earlier(self, arriving: Pending) -> Tensor:
        """Wait for the gathered keys and values, and take those that come before our chunks."""
        return arriving.wait().flatten(0, 1)[self.before]

    def _heads(self, q: Tensor, kv: Tensor) -> Iterator[tuple[slice, Pending]]:
        """For each key/value head yield its query heads, and the ring's keys and values, which are in flight."""
        serves = q.shape[1] // len(kv)
        coming = gather(kv[0], self.ring)
        for head in range(len(kv)):
            arriving = coming
            if head + 1 < len(kv):
                coming = gather(kv[head + 1], self.ring)
            yield slice(head * serves, (head + 1) * serves), arriving


def both(kv_k2D: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of one head, (k, 1, D) each."""
    return kv_k2D[:, :1], kv_k2D[:, 1:]


def keys_before(cut: Cut, rank: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the positions before each chunk of the rank that are not its own, and how many each chunk has.

    A position is given by its place among the gathered keys: rank by rank, in the order of each shard.
    """
    where = torch.cat(cut.places()).argsort()  # for each place of the pack, its place among the gathered keys
    index, lengths = [torch.zeros(0, dtype=torch.int64)], []
    for segment, chunks in zip(cut.segments, cut.chunks[rank], strict=True):
        for number, chunk in enumerate(chunks):
            first = chunks[0]
            earlier = [range(first.start), range(first.stop, chunk.start)] if number else [range(chunk.start)]
            index += [where[segment.start + each.start : segment.start + each.stop] for each in earlier]
            lengths.append(sum(len(each) for each in earlier))
    return torch.cat(index), tuple(lengths)
