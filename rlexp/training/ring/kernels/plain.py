"""The reference kernel: masked softmax written out, in any dtype and on any device.

It takes a piece of the queries at a time, so that its scores need bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import BlockKernel, Call, Grads, Seen, accumulation_dtype, segments

SCORES = 1 << 25  # elements of a score matrix held at once


class Plain(BlockKernel):
    name = "plain"

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q_qHD.dtype)
        out = q_qHD.new_zeros(*q_qHD.shape[:2], v_kGD.shape[2], dtype=dtype)
        lse = q_qHD.new_full(q_qHD.shape[:2], -torch.inf, dtype=dtype)
        groups = q_qHD.shape[1] // k_kGD.shape[1]
        for q_slice, k_slice, seen in segments(call):
            k, v = (x[k_slice].to(dtype).repeat_interleave(groups, dim=1) for x in (k_kGD, v_kGD))
            for piece, mask in _pieces(q_slice, k.shape[0], q_qHD.shape[1], seen, q_qHD.device):
                scores = _scores(q_qHD[piece].to(dtype), k, mask, scale)
                lse[piece] = scores.logsumexp(-1).transpose(0, 1)
                out[piece] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out, lse

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor,
        call: Call, scale: float,
    ) -> Grads:  # fmt: skip
        dtype = accumulation_dtype(q_qHD.dtype)
        dq = q_qHD.new_zeros(q_qHD.shape, dtype=dtype)
        dk = k_kGD.new_zeros(k_kGD.shape, dtype=dtype)
        dv = v_kGD.new_zeros(v_kGD.shape, dtype=dtype)
        heads, kv_heads = q_qHD.shape[1], k_kGD.shape[1]
        for q_slice, k_slice, seen in segments(call):
            k, v = (x[k_slice].to(dtype).repeat_interleave(heads // kv_heads, dim=1) for x in (k_kGD, v_kGD))
            for piece, mask in _pieces(q_slice, k.shape[0], heads, seen, q_qHD.device):
                q, dout, out = (x[piece].to(dtype) for x in (q_qHD, dout_qHD, out_qHD))
                # The global log-sum-exp makes these probabilities sum to 1 over all blocks.
                p = (_scores(q, k, mask, scale) - lse_qH[piece].transpose(0, 1).unsqueeze(-1)).exp()
                delta = (dout * out).sum(-1).transpose(0, 1).unsqueeze(-1)
                ds = p * (torch.einsum("qhd,khd->hqk", dout, v) - delta) * scale
                dq[piece] = torch.einsum("hqk,khd->qhd", ds, k)
                dk[k_slice] += _per_kv_head(torch.einsum("hqk,qhd->khd", ds, q), kv_heads)
                dv[k_slice] += _per_kv_head(torch.einsum("hqk,qhd->khd", p, dout), kv_heads)
        return dq, dk, dv


def _pieces(
    q_slice: slice, keys: int, heads: int, seen: Seen | None, device: torch.device
) -> Iterator[tuple[slice, Tensor | None]]:
    """Cut the queries into pieces with at most SCORES scores each, and yield them with masks of the keys that they do
    not see."""
    size = max(1, SCORES // (heads * keys))
    for start in range(q_slice.start, q_slice.stop, size):
        stop = min(start + size, q_slice.stop)
        mask = None
        if seen is not None:
            rows = torch.arange(start - q_slice.start, stop - q_slice.start, device=device)
            before = rows.unsqueeze(1) + seen[0] - torch.arange(keys, device=device)
            mask = before < 0 if seen[1] is None else (before < 0) | (before >= seen[1])
        yield slice(start, stop), mask


def _scores(q_qHD: Tensor, k_kHD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q_qHD, k_kHD) * scale
    return scores if mask is None else scores.masked_fill(mask, -torch.inf)


def _per_kv_head(grad_kHD: Tensor, kv_heads: int) -> Tensor:
    """Add up the gradients of the query heads that share a key/value head."""
    keys, _, size = grad_kHD.shape
    return grad_kHD.view(keys, kv_heads, -1, size).sum(2)
