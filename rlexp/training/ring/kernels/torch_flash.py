"""torch's own CUDA flash kernel, a copy of flash-attn 2 that comes with torch: nothing to install.

The operators are private; tests/training/ring/test_kernels.py checks that they still take and return what this file
expects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.varlen import NO_WINDOW, Given, Spans, Varlen

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class TorchFlash(Varlen):
    name = "torch_flash"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, call: Call) -> tuple[Tensor, Tensor]:
        bounds = (spans.cu_q, spans.cu_k, spans.max_q, spans.max_k)
        out, lse, *_ = _forward(q, k, v, *bounds, 0.0, call.causal, False, scale=call.scale, **_window(spans))
        return out, lse

    def call_backward(self, given: Given, spans: Spans, call: Call) -> Grads:
        # The state of dropout, which is off: not read.
        rng_state, unused = given[0].new_empty(2, dtype=torch.uint64), given[0].new_empty(0)
        bounds = (spans.cu_q, spans.cu_k, spans.max_q, spans.max_k)
        given_too = (*bounds, 0.0, call.causal, rng_state, unused)
        dq, dk, dv = _backward(*given, *given_too, scale=call.scale, **_window(spans))
        return dq, dk, dv


def _window(spans: Spans) -> dict[str, int]:
    left, right = spans.window
    return {} if spans.window == NO_WINDOW else {"window_size_left": left, "window_size_right": right}
