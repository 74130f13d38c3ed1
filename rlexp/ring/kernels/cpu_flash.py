"""torch's own CPU flash kernel, segment by segment.

bfloat16 blocks are computed in float32: more exact than one bfloat16 flash call over the whole sequence (0.4 to
0.8 of its error), and the merge needs float32 outputs anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.ring.kernels.base import Lengths, accumulation_dtype, segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x_tHD: Tensor, dtype: torch.dtype) -> Tensor:
    """(t, H, D) -> (1, H, t, D), a view unless the dtype changes. The kernel reads a head's elements as contiguous,
    whatever their stride says."""
    x_tHD = x_tHD.to(dtype)
    return (x_tHD if x_tHD.stride(-1) == 1 else x_tHD.contiguous()).transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1HtD: Tensor) -> Tensor:
    return x_1HtD.squeeze(0).transpose(0, 1)


def _forward_one(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q, k, v = (_heads_first(x, dtype) for x in (q, k, v))
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
    return _tokens_first(out), lse.squeeze(0).transpose(0, 1)


def _backward_one(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (_heads_first(x, dtype) for x in (dout, q, k, v, out))
    lse = lse.transpose(0, 1).unsqueeze(0).contiguous()
    dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
    return _tokens_first(dq), _tokens_first(dk), _tokens_first(dv)


class CpuFlash:
    name = "cpu_flash"

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
        dtype = accumulation_dtype(q_qHD.dtype)
        if len(q_lengths) == 1 and q_lengths[0] and k_lengths[0]:  # one long sequence: nothing to put together
            return _forward_one(q_qHD, k_kGD, v_kGD, causal, scale, dtype)
        out = torch.zeros(q_qHD.shape, dtype=dtype)
        lse = torch.full(q_qHD.shape[:2], -torch.inf, dtype=dtype)
        for at, keys in segments(q_lengths, k_lengths):
            out[at], lse[at] = _forward_one(q_qHD[at], k_kGD[keys], v_kGD[keys], causal, scale, dtype)
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulation_dtype(q_qHD.dtype)
        if len(q_lengths) == 1 and q_lengths[0] and k_lengths[0]:
            return _backward_one(dout_qHD, q_qHD, k_kGD, v_kGD, out_qHD, lse_qH, causal, scale, dtype)
        dq = torch.zeros(q_qHD.shape, dtype=dtype)
        dk = torch.zeros(k_kGD.shape, dtype=dtype)
        dv = torch.zeros(v_kGD.shape, dtype=dtype)
        for at, keys in segments(q_lengths, k_lengths):
            dq[at], dk[keys], dv[keys] = _backward_one(
                dout_qHD[at], q_qHD[at], k_kGD[keys], v_kGD[keys], out_qHD[at], lse_qH[at], causal, scale, dtype
            )
        return dq, dk, dv
