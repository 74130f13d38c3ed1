"""Attention of a rank that has all keys: one call of the kernel, and nothing to merge, to sum or to widen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.attention import Attention, Kept
from rlexp.training.ring.kernels.base import BlockKernel, Call, Grads, Rows
from rlexp.training.ring.selection import Selection, select


@dataclass(frozen=True)
class AlonePlan(Attention):
    """The real tokens of a shard that is the whole pack."""

    kernel: BlockKernel
    own: Selection

    def to(self, device: torch.device) -> AlonePlan:
        self.kernel.prepare(self.own.lengths, self.own.lengths, device)
        return replace(self, own=self.own.to(device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Kept]:
        rows = self.own.index
        queries, keys, values = (select(x, rows) for x in (self.kernel.ready(q), k, v))
        out, lse = self.kernel.forward(queries, keys, values, self._call(scale))
        out = _laid(out.to(q.dtype), rows, q)
        return out, (q, k, v, out, lse)

    def backward(self, dout: Tensor, kept: Kept, scale: float) -> Grads:
        q, k, v, out, lse = kept
        rows = self.own.index
        of_dout, queries, of_out = (select(self.kernel.ready(x), rows) for x in (dout, q, out))
        keys, values = select(k, rows), select(v, rows)
        grads = self.kernel.backward(of_dout, queries, keys, values, of_out, lse, self._call(scale))
        dq, dk, dv = (_laid(grad, rows, like) for grad, like in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv

    def _call(self, scale: float) -> Call:
        return Call(self.own.lengths, self.own.lengths, causal=True, scale=scale)


def _laid(x: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Lay the values of the real tokens where the shard has them; padding has zeros."""
    if isinstance(rows, slice) and len(x) == len(like):
        return x
    whole = x.new_zeros(like.shape)
    whole[rows] = x
    return whole
