"""The kernel of flash-attn 3 for Hopper, where it was built from the folder `hopper` of flash-attn's repository.

Its functions are called by position, since versions name their parameters differently. They take a window as a pair, or
as two numbers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.varlen import NO_WINDOW, Given, Spans, Varlen, empty_grads


@functools.cache
def _interface() -> Any:
    """Import it as a module of its own, or, as newer versions have it, from the package flash_attn_3."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
    return importlib.import_module("flash_attn_3.flash_attn_interface")


class FlashAttn3(Varlen):
    name = "flash_attn_3"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        forward = _interface()._flash_attn_forward
        new_keys_and_out, used, paged, rotary, descaled = [None] * 4, [None] * 3, [None] * 3, [None] * 3, [None] * 3
        out, lse, *_ = forward(
            q, k, v, *new_keys_and_out, spans.cu_q, spans.cu_k, *used, spans.max_q, spans.max_k,
            *paged, *rotary, *descaled, call.scale, causal=call.causal, **_window(forward, spans),
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        dq, dk, dv = empty_grads(given)
        used = (None, None)
        _interface()._flash_attn_backward(
            *given, spans.cu_q, spans.cu_k, *used, spans.max_q, spans.max_k, dq, dk, dv, call.scale, call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_window(_interface()._flash_attn_backward, spans),
        )  # fmt: skip
        return dq, dk, dv


def _window(function: Any, spans: Spans) -> dict[str, Any]:
    if spans.window == NO_WINDOW:
        return {}
    # An operator made by torch.library keeps the function that it was made of.
    if "window_size" in inspect.signature(getattr(function, "_init_fn", function)).parameters:
        return {"window_size": spans.window}
    return dict(zip(("window_size_left", "window_size_right"), spans.window, strict=True))
