"""The part that the flash kernels for CUDA share: all segments in one call, with their bounds in `cu_seqlens`.

The kernel never sees a segment without queries or without keys: versions differ in what its rows then hold (a
log-sum-exp of +∞, or memory that nobody wrote). Its tokens are left out by a view where the others are contiguous, as
in one long sequence, and by an index elsewhere.

The kernels compute in float32 and round their results to the dtype of the queries. Merging and summing take them as
they are, into float32.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import HALF, Call, Grads, Lengths, Rows
from rlexp.training.types import moved

# dout, q, k, v, out, and a contiguous log-sum-exp (H, q) of float32.
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# For one query per sequence, as in decoding, they take another path, which swaps heads and queries. Not needed here.
FEWEST_QUERIES = 2


@dataclass(frozen=True)
class Spans:
    """Rows of the segments that have both queries and keys, and the bounds of each segment."""

    queries: Rows
    keys: Rows
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


# A micro-batch has a few of them, which all layers and both passes share. `prepare` makes them before the first layer:
# there a copy of the host's memory would wait for the device.
@functools.lru_cache(maxsize=128)
def spans_of(q_lengths: Lengths, k_lengths: Lengths, device: torch.device) -> Spans | None:
    """Return None where no segment has both queries and keys."""
    kept = [bool(q and k) for q, k in zip(q_lengths, k_lengths, strict=True)]
    if not any(kept):
        return None
    q_kept, k_kept = (
        [length for length, has_both in zip(lengths, kept, strict=True) if has_both]
        for lengths in (q_lengths, k_lengths)
    )
    return Spans(
        _places(q_lengths, kept, device),
        _places(k_lengths, kept, device),
        _cumulative(q_kept, device),
        _cumulative(k_kept, device),
        max(FEWEST_QUERIES, *q_kept),
        max(k_kept),
    )


def _places(lengths: Lengths, kept: list[bool], device: torch.device) -> Rows:
    ranges, start = [], 0
    for length, has_both in zip(lengths, kept, strict=True):
        if length and has_both:
            ranges.append(range(start, start + length))
        start += length
    total = sum(len(each) for each in ranges)
    if total == start:
        return slice(None)
    if ranges[-1].stop - ranges[0].start == total:
        return slice(ranges[0].start, ranges[-1].stop)
    return moved(torch.cat([torch.arange(each.start, each.stop) for each in ranges]), device)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return moved(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _all_rows(rows: Rows) -> bool:
    return isinstance(rows, slice) and rows == slice(None)


def empty_grads(given: Given) -> Grads:
    """Make room for dq, dk and dv: contiguous, even where q, k and v are not."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[1:4])
    return dq, dk, dv


class Varlen:
    """Flash attention over packed segments. A subclass calls its package in `call_forward` and `call_backward`."""

    name: str
    dtypes = HALF

    def prepare(self, q_lengths: Lengths, k_lengths: Lengths, device: torch.device) -> None:
        spans_of(q_lengths, k_lengths, device)

    def ready(self, x: Tensor) -> Tensor:
        return x

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output (q, H, D) and log-sum-exp (H, q)."""
        raise NotImplementedError

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        """Return dq, dk and dv."""
        raise NotImplementedError

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        spans = spans_of(call.q_lengths, call.k_lengths, q_qHD.device)
        if spans is not None:
            q = _last_contiguous(q_qHD[spans.queries])
            k, v = (_last_contiguous(x[spans.keys]) for x in (k_kGD, v_kGD))
            kernel_out, kernel_lse = self.call_forward(q, k, v, spans, call)
            if _all_rows(spans.queries):
                return kernel_out, kernel_lse.transpose(0, 1)
        out = q_qHD.new_zeros(q_qHD.shape, dtype=torch.float32)
        lse = q_qHD.new_full(q_qHD.shape[:2], -torch.inf, dtype=torch.float32)
        if spans is not None:
            out[spans.queries], lse[spans.queries] = kernel_out.float(), kernel_lse.transpose(0, 1)
        return out, lse

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor, call: Call
    ) -> Grads:
        spans = spans_of(call.q_lengths, call.k_lengths, q_qHD.device)
        wholes = (q_qHD, k_kGD, v_kGD)
        if spans is None:
            dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in wholes)
            return dq, dk, dv
        dout, q, out = (_last_contiguous(x[spans.queries].to(q_qHD.dtype)) for x in (dout_qHD, q_qHD, out_qHD))
        k, v = (_last_contiguous(x[spans.keys]) for x in (k_kGD, v_kGD))
        lse = lse_qH[spans.queries].transpose(0, 1).contiguous()
        grads = self.call_backward((dout, q, k, v, out, lse), spans, call)
        dq, dk, dv = (
            _spread(grad, rows, x)
            for grad, rows, x in zip(grads, (spans.queries, spans.keys, spans.keys), wholes, strict=True)
        )
        return dq, dk, dv


def _spread(grad: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Put the gradient into these rows, and zero into those that the kernel did not see."""
    if _all_rows(rows):
        return grad
    whole = like.new_zeros(like.shape, dtype=torch.float32)
    whole[rows] = grad.float()
    return whole
