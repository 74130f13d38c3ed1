"""The package flash-attn 2, where it is installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlexp.ring.kernels.base import Grads
from rlexp.ring.kernels.varlen import Call, Given, Varlen, empty_grads


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


class FlashAttn2(Varlen):
    name = "flash_attn"

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            q,
            k,
            v,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
        )
        return out, lse

    def call_backward(self, given: Given, call: Call, causal: bool, scale: float) -> Grads:
        dq, dk, dv = empty_grads(given)
        _interface()._flash_attn_varlen_backward(
            *given,
            dq,
            dk,
            dv,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
