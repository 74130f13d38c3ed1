"""flash-attn 3, for Hopper, where it is installed: built from the folder `hopper` of flash-attn's repository.

Its functions are called by position: their parameters have had two sets of names.
"""

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
    """By itself, or since flash-attn has packages side by side, in one of its own."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
    return importlib.import_module("flash_attn_3.flash_attn_interface")


class FlashAttn3(Varlen):
    name = "flash_attn_3"

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        new_keys_and_out, used, paged, rotary, descaled = [None] * 4, [None] * 3, [None] * 3, [None] * 3, [None] * 3
        out, lse, *_ = _interface()._flash_attn_forward(
            q, k, v, *new_keys_and_out, call.cu_q, call.cu_k, *used, call.max_q, call.max_k,
            *paged, *rotary, *descaled, scale, causal=causal,
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, call: Call, causal: bool, scale: float) -> Grads:
        dq, dk, dv = empty_grads(given)
        used = (None, None)
        _interface()._flash_attn_backward(
            *given, call.cu_q, call.cu_k, *used, call.max_q, call.max_k, dq, dk, dv, scale, causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
