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
    """(t, H, D) -> (1, H, t, D), a view unless the dtype changes."""
    return x_tHD.transpose(0, 1).unsqueeze(0).to(dtype)


def _tokens_first(x_1HtD: Tensor) -> Tensor:
    return x_1HtD.squeeze(0).transpose(0, 1)


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
        out = torch.zeros(q_qHD.shape, dtype=dtype)
        lse = torch.full(q_qHD.shape[:2], -torch.inf, dtype=dtype)
        for q_slice, k_slice in segments(q_lengths, k_lengths):
            q, k, v = (_heads_first(x, dtype) for x in (q_qHD[q_slice], k_kGD[k_slice], v_kGD[k_slice]))
            block_out, block_lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
            out[q_slice] = _tokens_first(block_out)
            lse[q_slice] = block_lse.squeeze(0).transpose(0, 1)
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
        dq = torch.zeros(q_qHD.shape, dtype=dtype)
        dk = torch.zeros(k_kGD.shape, dtype=dtype)
        dv = torch.zeros(v_kGD.shape, dtype=dtype)
        for q_slice, k_slice in segments(q_lengths, k_lengths):
            dout, q, out = (_heads_first(x[q_slice], dtype) for x in (dout_qHD, q_qHD, out_qHD))
            k, v = (_heads_first(x[k_slice], dtype) for x in (k_kGD, v_kGD))
            lse = lse_qH[q_slice].transpose(0, 1).unsqueeze(0).contiguous()
            grads = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
            dq[q_slice], dk[k_slice], dv[k_slice] = (_tokens_first(grad) for grad in grads)
        return dq, dk, dv
