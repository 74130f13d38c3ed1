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

from rlexp.ring.attention import Attention, Kept
from rlexp.ring.collectives import Pending, gather, sum_and_scatter
from rlexp.ring.cut import Cut
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel, Call, Grads, accumulation_dtype
from rlexp.ring.layout import ALL, Deal, Layout
from rlexp.ring.layouts.zigzag import zigzag
from rlexp.ring.rotation import empty_output, merge
from rlexp.ring.selection import Selection, parts_of
from rlexp.types import Segment, moved


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
        own = self.own.index
        out, lse = empty_output(q)
        kv = torch.stack((k, v), dim=2).transpose(0, 1).contiguous()  # (G, t, 2, D)
        queries = self.kernel.ready(q)
        to_own, to_earlier = self._calls(scale)
        for heads, mine, arriving in self._heads(q, kv):
            at = (own, heads)
            block = self.kernel.forward(queries[at], *both(mine[own]), to_own)
            merge(out[:, heads], lse[:, heads], *block, own, first=True)
            block = self.kernel.forward(queries[at], *both(self._earlier(arriving)), to_earlier)
            merge(out[:, heads], lse[:, heads], *block, own, first=False)
        result = out.to(q.dtype)
        return result, (q, kv, result, lse)

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        q, kv, out, lse = kept
        own, dtype = self.own.index, accumulation_dtype(q.dtype)
        dq, dkv = q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        dout, q, out = (self.kernel.ready(x) for x in (dout, q, out))
        to_own, to_earlier = self._calls(scale)
        going: list[Pending] = []
        for head, (heads, mine, arriving) in enumerate(self._heads(q, kv)):
            at = (own, heads)
            known = (out[at], lse[at])
            dq_own, *dkv_own = self.kernel.backward(dout[at], q[at], *both(mine[own]), *known, to_own)
            dkv[head][own] = torch.cat(dkv_own, dim=1)
            keys = both(self._earlier(arriving))
            dq_before, *dkv_before = self.kernel.backward(dout[at], q[at], *keys, *known, to_earlier)
            dq[at] = dq_own + dq_before
            # A key may come before both of our chunks.
            spread = dkv.new_zeros(self.ring.size, *mine.shape)
            spread.flatten(0, 1).index_add_(0, self.before, torch.cat(dkv_before, 1))
            if going:  # one at a time: the spread gradient is as long as the whole pack
                dkv[head - 1] += going.pop().wait()
            going.append(sum_and_scatter(spread, self.ring))
        dkv[-1] += going.pop().wait()
        dk, dv = dkv.transpose(0, 1).unbind(2)
        return dq, dk, dv

    def _calls(self, scale: float) -> tuple[Call, Call]:
        """Return the kernel's calls over our own keys, and over the earlier keys of other ranks."""
        own = self.own.lengths
        return Call(own, own, causal=True, scale=scale), Call(self.chunks, self.before_lengths, False, scale)

    def _earlier(self, arriving: Pending) -> Tensor:
        """Wait for the gathered keys and values, and take those that come before our chunks."""
        return arriving.wait().flatten(0, 1)[self.before]

    def _heads(self, q: Tensor, kv: Tensor) -> Iterator[tuple[slice, Tensor, Pending]]:
        """For each key/value head yield its query heads, our keys and values, and the ring's, which are in flight."""
        serves = q.shape[1] // len(kv)
        coming = gather(kv[0], self.ring)
        for head, mine in enumerate(kv):
            arriving = coming
            if head + 1 < len(kv):
                coming = gather(kv[head + 1], self.ring)
            yield slice(head * serves, (head + 1) * serves), mine, arriving


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
