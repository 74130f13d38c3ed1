"""The kernel of the package flash-attn 2, where it is installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.varlen import Given, Spans, Varlen, empty_grads


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


class FlashAttn2(Varlen):
    name = "flash_attn"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        left, right = spans.window
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q, k, v, spans.cu_q, spans.cu_k, spans.max_q, spans.max_k, dropout_p=0.0, softmax_scale=call.scale,
            causal=call.causal, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        left, right = spans.window
        dq, dk, dv = empty_grads(given)
        _interface()._flash_attn_varlen_backward(
            *given, dq, dk, dv, spans.cu_q, spans.cu_k, spans.max_q, spans.max_k, dropout_p=0.0,
            softmax_scale=call.scale, causal=call.causal, window_size_left=left, window_size_right=right, softcap=0.0,
            alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
