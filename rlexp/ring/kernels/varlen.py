"""What the flash kernels for CUDA share: all segments in one call, which is told by `cu_seqlens` where each begins.

A segment without queries or without keys is kept from the kernel: what its rows then hold is not the same in all
versions (a log-sum-exp of +∞, or what was in memory before). Its tokens are left out by a view where the others are
contiguous, as those of one long sequence are, and by an index elsewhere.

The kernels compute in float32 and round what they return to the dtype of the queries; it is converted here for what is
merged and added up.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.ring.kernels.base import HALF, Grads, Lengths

# dout, q, k, v, out, and a contiguous log-sum-exp (H, q) of float32.
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# For one query a sequence, as in decoding, they have another path, which swaps heads and queries. Not needed here.
FEWEST_QUERIES = 2


@dataclass(frozen=True)
class Call:
    """Where the tokens lie of the segments that have both queries and keys, and where each of them begins."""

    queries: slice | Tensor
    keys: slice | Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


# A micro-batch has a few of them, which all layers and both passes use: each is moved to the device once.
@functools.lru_cache(maxsize=128)
def call_of(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device) -> Call | None:
    """None where no segment has both."""
    kept = [bool(q and k) for q, k in zip(q_lengths, k_lengths, strict=True)]
    if not any(kept):
        return None
    q_kept, k_kept = (
        [length for length, has_both in zip(lengths, kept, strict=True) if has_both]
        for lengths in (q_lengths, k_lengths)
    )
    return Call(
        _places(q_lengths, kept, device),
        _places(k_lengths, kept, device),
        _cumulative(q_kept, device),
        _cumulative(k_kept, device),
        max(FEWEST_QUERIES, *q_kept),
        max(k_kept),
    )


def _places(lengths: tuple[int, ...], kept: list[bool], device: torch.device) -> slice | Tensor:
    found, start = [], 0
    for length, has_both in zip(lengths, kept, strict=True):
        if length and has_both:
            found.append(range(start, start + length))
        start += length
    total = sum(len(each) for each in found)
    if total == start:
        return slice(None)
    if found[-1].stop - found[0].start == total:
        return slice(found[0].start, found[-1].stop)
    return torch.cat([torch.arange(each.start, each.stop) for each in found]).to(device)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _everything(at: slice | Tensor) -> bool:
    return isinstance(at, slice) and at == slice(None)


def empty_grads(given: Given) -> Grads:
    """Contiguous, whatever q, k and v are."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[1:4])
    return dq, dk, dv


class Varlen:
    """A kernel says what it is called; `call_forward` and `call_backward` are its own calls."""

    name: str
    dtypes = HALF

    def ready(self, x: Tensor) -> Tensor:
        return x

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output (q, H, D) and log-sum-exp (H, q)."""
        raise NotImplementedError

    def call_backward(self, given: Given, call: Call, causal: bool, scale: float) -> Grads:
        """dq, dk and dv."""
        raise NotImplementedError

    def forward(
        self,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        call = call_of(tuple(q_lengths), tuple(k_lengths), q_qHD.device)
        if call is not None:
            q, k, v = (
                _last_contiguous(x[at]) for x, at in ((q_qHD, call.queries), (k_kGD, call.keys), (v_kGD, call.keys))
            )
            found_out, found_lse = self.call_forward(q, k, v, call, causal, scale)
            if _everything(call.queries):
                return found_out.float(), found_lse.transpose(0, 1)
        out = q_qHD.new_zeros(q_qHD.shape, dtype=torch.float32)
        lse = q_qHD.new_full(q_qHD.shape[:2], -torch.inf, dtype=torch.float32)
        if call is not None:
            out[call.queries], lse[call.queries] = found_out.float(), found_lse.transpose(0, 1)
        return out, lse

    def backward(
        self,
        dout_qHD: Tensor,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        out_qHD: Tensor,
        lse_qH: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        call = call_of(tuple(q_lengths), tuple(k_lengths), q_qHD.device)
        wholes = (q_qHD, k_kGD, v_kGD)
        if call is None:
            dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in wholes)
            return dq, dk, dv
        dout, q, out = (_last_contiguous(x[call.queries].to(q_qHD.dtype)) for x in (dout_qHD, q_qHD, out_qHD))
        k, v = (_last_contiguous(x[call.keys]) for x in (k_kGD, v_kGD))
        lse = lse_qH[call.queries].transpose(0, 1).contiguous()
        found = self.call_backward((dout, q, k, v, out, lse), call, causal, scale)
        dq, dk, dv = (
            _spread(grad.float(), at, x)
            for grad, at, x in zip(found, (call.queries, call.keys, call.keys), wholes, strict=True)
        )
        return dq, dk, dv


def _spread(grad: Tensor, at: slice | Tensor, like: Tensor) -> Tensor:
    """Zero for tokens that were kept from the kernel."""
    if _everything(at):
        return grad
    whole = like.new_zeros(like.shape, dtype=torch.float32)
    whole[at] = grad
    return whole
