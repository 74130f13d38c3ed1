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

from rlexp.training.ring.alone import AlonePlan
from rlexp.training.ring.attention import Attention, Kept
from rlexp.training.ring.base import Deal, Layout
from rlexp.training.ring.collectives import exchange
from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel, Grads, accumulation_dtype
from rlexp.training.ring.layouts.zigzag import Zigzag
from rlexp.training.ring.rotation import RotatingPlan
from rlexp.training.types import Segment

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
    around: RotatingPlan | AlonePlan

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
    """Exchange tokens for heads, attend among the ranks that compute the same heads, and exchange back.

    Every element is written once into what is sent, in the order in which the other side can use what it receives: by
    token where a kernel reads it, by head where it is a gradient of the model's. Outputs need no packing, and are
    copied where they arrive, since the product that follows takes all heads of a token together.
    """

    heads: Heads
    ring: Ring
    around: RotatingPlan | AlonePlan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        (queries,), (keys, values) = self._to_heads(q), self._to_heads(k, v, copies=self.heads.copies)
        out, kept = self.around.forward(queries, keys, values, scale)
        return self._to_tokens(out), kept

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        (of_heads,) = self._to_heads(dout)
        dq, dk, dv = self.around.backward(of_heads, kept, scale)
        if self.heads.copies == 1:  # no more sums follow, so rounding before the exchange rounds once
            dq, dk, dv = (self._home(grad, dout.dtype) for grad in (dq, dk, dv))
            return dq, dk, dv
        wide = accumulation_dtype(dout.dtype)
        return self._home(dq, dout.dtype), self._sum(self._home(dk, wide)), self._sum(self._home(dv, wide))

    def _to_heads(self, *tensors: Tensor, copies: int = 1) -> tuple[Tensor, ...]:
        """Exchange each (t, ranks · h / copies, D) for (ranks · t, h, D), all in one collective."""
        ranks = self.heads.ranks
        first = tensors[0]
        each = first.shape[1] * copies // ranks
        packed = first.new_empty(ranks, len(first), len(tensors) * each, first.shape[2])
        for part, x in zip(packed.split(each, dim=2), tensors, strict=True):
            _spread(part.transpose(0, 1), x, copies)
        return exchange(packed, self.ring).flatten(0, 1).split(each, dim=1)

    def _to_tokens(self, out: Tensor) -> Tensor:
        """Exchange (ranks · t, h, D) for (t, ranks · h, D)."""
        arrived = exchange(out.contiguous().unflatten(0, (self.heads.ranks, -1)), self.ring)
        return arrived.transpose(0, 1).flatten(1, 2)

    def _home(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Exchange a gradient (ranks · t, h, D) for (t, ranks · h, D), whose memory has one head after the other."""
        by_rank = grad.unflatten(0, (self.heads.ranks, -1)).transpose(1, 2)
        packed = torch.empty(by_rank.shape, dtype=dtype, device=grad.device).copy_(by_rank)
        return exchange(packed, self.ring).flatten(0, 1).transpose(0, 1)

    def _sum(self, grad: Tensor) -> Tensor:
        """Sum the gradients of each head's copies."""
        return grad.unflatten(1, (-1, self.heads.copies)).sum(2)


def _spread(into_trhD: Tensor, x: Tensor, copies: int) -> None:
    """Write (t, G, D) to (t, ranks, h, D), with as many copies of each head beside it."""
    _, ranks, each, _ = into_trhD.shape
    if copies > 1 and each == 1:
        into_trhD.squeeze(2).unflatten(1, (-1, copies)).copy_(x.unsqueeze(2))
        return
    if copies > 1:  # heads and ranks do not nest: few models
        x = x.repeat_interleave(copies, dim=1)
    into_trhD.copy_(x.unflatten(1, (ranks, each)))
