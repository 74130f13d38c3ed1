"""The kernel of the package flash-attn-4 for Blackwell, where it is installed. It is compiled at its first use."""

from __future__ import annotations

import functools
import importlib
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Ask, Call, Grads
from rlexp.training.ring.kernels.varlen import NO_WINDOW, Given, Spans, Varlen


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


class FlashAttn4(Varlen):
    name = "flash_attn_4"

    def refuses(self, ask: Ask) -> str | None:
        """Older versions have no window in their backward pass."""
        if ask.window is not None and "window_size_left" not in signature(_interface()._flash_attn_bwd).parameters:
            return f"a window of {ask.window:,} tokens"
        return super().refuses(ask)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, **_options(spans, call), return_lse=True)
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        dout, q, k, v, out, lse = given
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = _options(spans, call) | {"deterministic": deterministic}
        dq, dk, dv, *_ = _interface()._flash_attn_bwd(q, k, v, out, dout, lse, **options)
        return dq, dk, dv


def _options(spans: Spans, call: Call) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
    options |= {"cu_seqlens_q": spans.cu_q, "cu_seqlens_k": spans.cu_k}
    options |= {"max_seqlen_q": spans.max_q, "max_seqlen_k": spans.max_k}
    windows = ("window_size_left", "window_size_right")
    return options | ({} if spans.window == NO_WINDOW else dict(zip(windows, spans.window, strict=True)))
