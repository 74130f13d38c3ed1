"""The kernels of flash-attn 2 and 3, a class for each package. flash-attn 4 has a file of its own.

The operators of torch's copy of flash-attn 2 are private; tests/training/ring/test_kernels.py checks that they still
take and return what this file expects. flash-attn 3 is for Hopper, and is built from the folder `hopper` of
flash-attn's repository. Its functions are called by position, since versions name their parameters differently.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.varlen import NO_WINDOW, Given, Inputs, Spans, Varlen, empty_grads

_torch_forward = torch.ops.aten._flash_attention_forward
_torch_backward = torch.ops.aten._flash_attention_backward


class TorchFlash(Varlen):
    """torch's own CUDA flash kernel, a copy of flash-attn 2 that comes with torch: nothing to install."""

    name = "torch_flash"

    def call_forward(self, inputs: Inputs, spans: Spans, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _torch_forward(*inputs, *spans.bounds, 0.0, call.causal, False, scale=scale, **_sides(spans))
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call, scale: float) -> Grads:
        # The state of dropout, which is off: not read.
        rng_state, unused = given[0].new_empty(2, dtype=torch.uint64), given[0].new_empty(0)
        given_too = (*spans.bounds, 0.0, call.causal, rng_state, unused)
        return _torch_backward(*given, *given_too, scale=scale, **_sides(spans))


class FlashAttn2(Varlen):
    """The package flash-attn 2, where it is installed."""

    name = "flash_attn"

    def call_forward(self, inputs: Inputs, spans: Spans, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        left, right = spans.window
        out, lse, *_ = second()._flash_attn_varlen_forward(
            *inputs, *spans.bounds, dropout_p=0.0, softmax_scale=scale, causal=call.causal,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call, scale: float) -> Grads:
        left, right = spans.window
        dq, dk, dv = empty_grads(given)
        second()._flash_attn_varlen_backward(
            *given, dq, dk, dv, *spans.bounds, dropout_p=0.0, softmax_scale=scale, causal=call.causal,
            window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn3(Varlen):
    name = "flash_attn_3"

    def call_forward(self, inputs: Inputs, spans: Spans, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        forward, (cu_q, cu_k, *longest) = third()._flash_attn_forward, spans.bounds
        new_keys_and_out, used, paged, rotary, descaled = [None] * 4, [None] * 3, [None] * 3, [None] * 3, [None] * 3
        out, lse, *_ = forward(
            *inputs, *new_keys_and_out, cu_q, cu_k, *used, *longest, *paged, *rotary, *descaled, scale,
            causal=call.causal, **_pair_or_sides(forward, spans),
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call, scale: float) -> Grads:
        backward, (cu_q, cu_k, *longest) = third()._flash_attn_backward, spans.bounds
        dq, dk, dv = empty_grads(given)
        used = (None, None)
        backward(
            *given, cu_q, cu_k, *used, *longest, dq, dk, dv, scale, call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_pair_or_sides(backward, spans),
        )  # fmt: skip
        return dq, dk, dv


@functools.cache
def second() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


@functools.cache
def third() -> Any:
    """Import flash-attn 3 as a module of its own, or, as newer versions have it, from the package flash_attn_3."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
    return importlib.import_module("flash_attn_3.flash_attn_interface")


def _sides(spans: Spans) -> dict[str, Any]:
    left, right = spans.window
    return {} if spans.window == NO_WINDOW else {"window_size_left": left, "window_size_right": right}


def _pair_or_sides(function: Any, spans: Spans) -> dict[str, Any]:
    """Return the window as a version of flash-attn 3 takes it."""
    # An operator made by torch.library keeps the function that it was made of.
    pair = "window_size" in inspect.signature(getattr(function, "_init_fn", function)).parameters
    return {"window_size": spans.window} if pair and spans.window != NO_WINDOW else _sides(spans)
