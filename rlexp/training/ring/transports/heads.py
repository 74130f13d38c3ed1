"""Heads for tokens: each rank receives all tokens of some heads, attends, and sends the outputs back.

With fewer key/value heads than ranks, each is sent to every rank whose queries need it, and the gradients of the copies
are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.attention import Attended, Attention, Kept
from rlexp.training.ring.collectives import exchange
from rlexp.training.ring.kernels.base import Ask, Grads, accumulation_dtype
from rlexp.training.ring.plan import RingPlan
from rlexp.training.world.groups import Ring


@dataclass(frozen=True)
class HeadsPlan:
    """The ring that shares out the heads, and the plan of the ring that computes the same heads."""

    inner: Ring
    around: RingPlan

    def to(self, device: torch.device) -> HeadsPlan:
        return replace(self, around=self.around.to(device))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        heads = HeadShares(q_tHD.shape[1], k_tGD.shape[1], self.inner.size)
        return SharedHeads(heads, self.inner, self.around).attend(q_tHD, k_tGD, v_tGD, ask)


@dataclass(frozen=True)
class HeadShares:
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


@dataclass(frozen=True)
class SharedHeads(Attention):
    """Exchange tokens for heads, attend among the ranks that compute the same heads, and exchange back.

    Every element is written once into what is sent, in the order in which the other side can use what it receives: by
    token where a kernel reads it, by head where it is a gradient of the model's. Outputs need no packing, and are
    copied where they arrive, since the product that follows takes all heads of a token together.
    """

    heads: HeadShares
    ring: Ring
    around: RingPlan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:
        (queries,), (keys, values) = self._to_heads(q), self._to_heads(k, v, copies=self.heads.copies)
        out, kept = self.around.forward(queries, keys, values, ask)
        return self._to_tokens(out), kept

    def again(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended) -> tuple[Tensor, Kept]:
        (queries,), (keys, values) = self._to_heads(q), self._to_heads(k, v, copies=self.heads.copies)
        out, kept = self.around.again(queries, keys, values, attended)
        return self._to_tokens(out), kept

    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:
        (of_heads,) = self._to_heads(dout)
        dq, dk, dv = self.around.backward(of_heads, kept, ask)
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
        sizes = [x.shape[2] for x in tensors]
        widths = [each * size for size in sizes]
        packed = first.new_empty(ranks, len(first), sum(widths))
        for part, x in zip(packed.split(widths, dim=2), tensors, strict=True):
            _spread(part.unflatten(2, (each, -1)).transpose(0, 1), x, copies)
        arrived = exchange(packed, self.ring).flatten(0, 1).split(widths, dim=1)
        return tuple(part.unflatten(1, (each, size)) for part, size in zip(arrived, sizes, strict=True))

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
