"""Ulysses: each rank holds a piece of the pack, and for attention it receives all tokens of some heads.

    ring 4   tokens held  0 1 2 3     heads computed  0 1 | 2 3 | 4 5 | 6 7
             by rank      0 1 2 3     by rank          0     1     2     3

Attention itself is then as on one device: one call of the kernel, no merging, and the same work on every rank.
With fewer key/value heads than ranks, each is sent to every rank whose queries need it, and the gradients of the copies
are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.ring.attention import Attention, Kept
from rlexp.ring.collectives import exchange
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel, Grads
from rlexp.ring.layout import Deal, Layout
from rlexp.ring.layouts.zigzag import Zigzag
from rlexp.ring.rotation import RotatingPlan
from rlexp.types import Segment

ROUND = Zigzag()  # ring among the ranks that compute the same heads; for a rank alone, one call of the kernel


class Ulysses(Layout):
    name = "ulysses"

    def shared(self, ring_size: int) -> int:
        """Return how many ranks share out the heads among them."""
        return ring_size

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        """Cut the piece of each rank of the outer ring once more, among the ranks that share out its heads."""
        inner = self.shared(ring_size)
        outer = ROUND.deal(segments, ring_size // inner)
        share = len(outer.places[0]) // inner
        real = [min(max(real - piece * share, 0), share) for real in outer.real for piece in range(inner)]
        work = [work / inner for work in outer.work for _ in range(inner)]
        return Deal(tuple(piece for places in outer.places for piece in places.split(share)), tuple(real), tuple(work))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel) -> HeadsPlan:
        inner, outer = ring.split(self.shared(ring.size))
        return HeadsPlan(inner, ROUND.plan(segments, outer, kernel))


@dataclass(frozen=True)
class HeadsPlan:
    """The ring that shares out the heads, and the plan of the ring that computes the same heads."""

    inner: Ring
    around: RotatingPlan

    def to(self, device: torch.device) -> HeadsPlan:
        return replace(self, around=self.around.to(device))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, scale: float) -> Tensor:
        heads = Heads(q_tHD.shape[1], k_tGD.shape[1], self.inner.size)
        return SharedHeads(heads, self.inner, self.around).attend(q_tHD, k_tGD, v_tGD, scale)


@dataclass(frozen=True)
class Heads:
    """Query and key/value heads, and the ranks that share them out."""

    queries: int
    keys: int
    ranks: int

    def __post_init__(self) -> None:
        if self.queries % self.ranks:
            raise ValueError(f"{self.queries} heads cannot be shared out among {self.ranks} ranks")

    @property
    def each(self) -> int:
        """Query heads of a rank."""
        return self.queries // self.ranks

    @property
    def copies(self) -> int:
        """Copies of each key/value head that are sent.

        It is one, or one for each rank whose queries need the head. Where ranks would then hold unequal numbers of
        heads, each query head gets its own copy.
        """
        serves = self.queries // self.keys
        even = self.each % serves == 0 or serves % self.each == 0
        return max(1, self.ranks // self.keys) if even else serves

    def keys_of(self, rank: int) -> range:
        """Key/value heads that go to a rank, counted with the copies of each beside it."""
        each = self.keys * self.copies // self.ranks
        return range(rank * each, (rank + 1) * each)


@dataclass(frozen=True)
class SharedHeads(Attention):
    """Exchange tokens for heads, attend among the ranks that compute the same heads, and exchange back."""

    heads: Heads
    ring: Ring
    around: RotatingPlan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        q, k, v = self._to_heads(q, self._copied(k), self._copied(v))
        # A copy of q, so that the backward pass does not keep the whole buffer that has arrived.
        out, kept = self.around.forward(q.contiguous(), k, v, scale)
        return self._to_tokens(out)[0], kept

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        grads = self.around.backward(self._to_heads(dout)[0], kept, scale)
        if self.heads.copies == 1:  # no more sums follow, so rounding before the exchange rounds once
            dq, dk, dv = self._to_tokens(*(grad.to(dout.dtype) for grad in grads))
            return dq, dk, dv
        (dq,), (dk, dv) = self._to_tokens(grads[0].to(dout.dtype)), self._to_tokens(*grads[1:])
        return dq, self._sum(dk), self._sum(dv)

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange each (t, ranks · h, D) for (ranks · t, h, D), all in one collective."""
        ranks = self.heads.ranks
        by_rank = [x.unflatten(1, (ranks, -1)).transpose(0, 1) for x in tensors]
        arrived = exchange(torch.cat(by_rank, dim=2), self.ring).flatten(0, 1)
        return arrived.split([x.shape[2] for x in by_rank], dim=1)

    def _to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange each (ranks · t, h, D) for (t, ranks · h, D), all in one collective."""
        by_rank = [x.unflatten(0, (self.heads.ranks, -1)) for x in tensors]
        arrived = exchange(torch.cat(by_rank, dim=2), self.ring).transpose(0, 1)
        return tuple(x.flatten(1, 2) for x in arrived.split([x.shape[2] for x in by_rank], dim=2))

    def _copied(self, x: Tensor) -> Tensor:
        """(t, G, D) to (t, G · copies, D)."""
        return x.repeat_interleave(self.heads.copies, dim=1) if self.heads.copies > 1 else x

    def _sum(self, grad: Tensor) -> Tensor:
        """Sum the gradients of each head's copies."""
        return grad.unflatten(1, (-1, self.heads.copies)).sum(2)
