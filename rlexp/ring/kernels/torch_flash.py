"""torch's own CUDA flash kernel, a copy of flash-attn 2 that comes with torch: nothing to install.

The operators are private; that they answer as they are called here is looked up in tests/test_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.ring.kernels.base import Grads
from rlexp.ring.kernels.varlen import Call, Given, Varlen

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class TorchFlash(Varlen):
    name = "torch_flash"

    def call_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, causal, False, scale=scale
        )  # fmt: skip
        return out, lse

    def call_backward(self, given: Given, call: Call, causal: bool, scale: float) -> Grads:
        # Of dropout, which there is none of: not read.
        rng_state, unused = given[0].new_empty(2, dtype=torch.uint64), given[0].new_empty(0)
        dq, dk, dv = _backward(
            *given, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, causal, rng_state, unused, scale=scale
        )
        return dq, dk, dv
