"""The kernel of the package flash-attn-4 for Blackwell, where it is installed. It is compiled at its first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.varlen import Given, Spans, Varlen


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


class FlashAttn4(Varlen):
    name = "flash_attn_4"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface()._flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=spans.cu_q,
            cu_seqlens_k=spans.cu_k,
            max_seqlen_q=spans.max_q,
            max_seqlen_k=spans.max_k,
            softmax_scale=call.scale,
            causal=call.causal,
            return_lse=True,
        )
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        dout, q, k, v, out, lse = given
        dq, dk, dv, *_ = _interface()._flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            softmax_scale=call.scale,
            causal=call.causal,
            cu_seqlens_q=spans.cu_q,
            cu_seqlens_k=spans.cu_k,
            max_seqlen_q=spans.max_q,
            max_seqlen_k=spans.max_k,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
