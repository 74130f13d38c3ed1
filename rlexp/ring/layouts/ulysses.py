"""Ulysses: tokens are held in pieces of the pack, and for attention every rank is given all tokens of some heads.

    ring 4   tokens held  0 1 2 3     heads computed  0 1 | 2 3 | 4 5 | 6 7
             by rank      0 1 2 3     by rank          0     1     2     3

Attention itself is then that of one device: one call of the kernel, nothing merged, and the same work on every rank.
With fewer heads of keys than ranks each is sent to all ranks whose queries need it, and its gradients are summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rlexp.ring.collectives import exchange
from rlexp.ring.groups import Ring
from rlexp.ring.layout import Deal, Grads, Kept, differentiable
from rlexp.ring.layouts.zigzag import Zigzag
from rlexp.ring.rotation import RotatingPlan
from rlexp.types import Segment

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch

ROUND = Zigzag()  # by which those attend that have the same heads; alone, that is one call of the kernel


@dataclass(frozen=True)
class HeadsPlan:
    """Of the ring of those that have the same heads."""

    outer: RotatingPlan

    def to(self, device: torch.device) -> HeadsPlan:
        return HeadsPlan(self.outer.to(device))


class Ulysses:
    name = "ulysses"

    def shared(self, ring_size: int) -> int:
        """Among how many ranks heads are shared out."""
        return ring_size

    def multiple(self, ring_size: int) -> int:
        return ring_size

    def unit(self, ring_size: int) -> int:  # noqa: ARG002
        return 1

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal:
        """The pieces of the outer ring's ranks, cut once more."""
        inner = self.shared(ring_size)
        outer = ROUND.deal(segments, ring_size // inner)
        share = len(outer.places[0]) // inner
        real = [min(max(real - piece * share, 0), share) for real in outer.real for piece in range(inner)]
        work = [work / inner for work in outer.work for _ in range(inner)]
        return Deal(tuple(piece for places in outer.places for piece in places.split(share)), tuple(real), tuple(work))

    def plan(self, segments: Sequence[Segment], ring: Ring) -> HeadsPlan:
        return HeadsPlan(ROUND.plan(segments, ring.split(self.shared(ring.size))[1]))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        inner, outer = batch.ring.split(self.shared(batch.ring.size))
        around = replace(batch, ring=outer, layout=ROUND, plan=cast("HeadsPlan", batch.plan).outer)
        shared = SharedHeads(Heads(q_tHD.shape[1], k_tGD.shape[1], inner.size), inner)
        return differentiable(shared, q_tHD, k_tGD, v_tGD, around, scale)


@dataclass(frozen=True)
class Heads:
    """Which of them each of so many ranks computes."""

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
        """How often a head of keys is sent: to one rank, to each of several whose queries need it, or where those do
        not need as many heads each, for every query."""
        serves = self.queries // self.keys
        even = self.each % serves == 0 or serves % self.each == 0
        return max(1, self.ranks // self.keys) if even else serves

    def keys_of(self, rank: int) -> range:
        """What goes to a rank, of all heads of keys with their copies beside them."""
        each = self.keys * self.copies // self.ranks
        return range(rank * each, (rank + 1) * each)


@dataclass(frozen=True)
class SharedHeads:
    """All tokens of this rank's heads, attention by those that have the same heads, and back."""

    heads: Heads
    ring: Ring

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: RingBatch, scale: float) -> tuple[Tensor, Kept]:
        q, k, v = self._to_heads(q, self._copied(k), self._copied(v))
        # A copy of q, so that what is kept for the backward pass is not all that has arrived.
        out, kept = ROUND.forward(q.contiguous(), k, v, batch, scale)
        return self._to_tokens(out)[0], kept

    def backward(self, dout: Tensor, kept: Kept, batch: RingBatch, scale: float) -> Grads:
        grads = ROUND.backward(self._to_heads(dout)[0], kept, batch, scale)
        if self.heads.copies == 1:  # nothing is added up any more: what is rounded now is rounded once
            dq, dk, dv = self._to_tokens(*(grad.to(dout.dtype) for grad in grads))
            return dq, dk, dv
        (dq,), (dk, dv) = self._to_tokens(grads[0].to(dout.dtype)), self._to_tokens(*grads[1:])
        return dq, self._sum(dk), self._sum(dv)

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(t, ranks · h, D) of each to (ranks · t, h, D), in one exchange."""
        ranks = self.heads.ranks
        by_rank = [x.unflatten(1, (ranks, -1)).transpose(0, 1) for x in tensors]
        arrived = exchange(torch.cat(by_rank, dim=2), self.ring).flatten(0, 1)
        return arrived.split([x.shape[2] for x in by_rank], dim=1)

    def _to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(ranks · t, h, D) of each to (t, ranks · h, D)."""
        by_rank = [x.unflatten(0, (self.heads.ranks, -1)) for x in tensors]
        arrived = exchange(torch.cat(by_rank, dim=2), self.ring).transpose(0, 1)
        return tuple(x.flatten(1, 2) for x in arrived.split([x.shape[2] for x in by_rank], dim=2))

    def _copied(self, x: Tensor) -> Tensor:
        """(t, G, D) to (t, G · copies, D)."""
        return x.repeat_interleave(self.heads.copies, dim=1) if self.heads.copies > 1 else x

    def _sum(self, grad: Tensor) -> Tensor:
        """Of a head's copies."""
        return grad.unflatten(1, (-1, self.heads.copies)).sum(2)
