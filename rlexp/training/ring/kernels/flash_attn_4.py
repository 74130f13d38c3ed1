"""The kernel of the package flash-attn-4 for Hopper and Blackwell, where it is installed.

Each of its kernels is compiled at its first use. It is reached through two operators of ours, which give it to a GPU
alone. So a rehearsal sees what the passes return, and `workspace` says what the backward pass holds meanwhile; neither
needs the package.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import Call, Grads
from rlexp.training.ring.kernels.own_operators import define
from rlexp.training.ring.kernels.varlen import NO_WINDOW, Given, Inputs, Spans, Varlen

HOPPER = 9


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


class FlashAttn4(Varlen):
    name = "flash_attn_4"

    def call_forward(self, inputs: Inputs, spans: Spans, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.rlexp.flash_attn_4_forward(*inputs, *_options(spans, call, scale))

    def call_backward(self, given: Given, spans: Spans, call: Call, scale: float) -> Grads:
        how = (torch.are_deterministic_algorithms_enabled(), self.generation)
        return torch.ops.rlexp.flash_attn_4_backward(*given, *_options(spans, call, scale), *how)


def _options(spans: Spans, call: Call, scale: float) -> tuple[Any, ...]:
    # The package takes None for a side without a bound, and reads −1 so only if both sides have it.
    left, right = (None, None) if spans.window == NO_WINDOW else spans.window
    return *spans.bounds, scale, call.causal, left, right


# ---- the operators ----

_OPTIONS = "Tensor cu_q, Tensor cu_k, int max_q, int max_k, float scale, bool causal, int? left, int? right"
_SCHEMAS = (
    f"flash_attn_4_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    f"flash_attn_4_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool deterministic, int? generation) -> (Tensor, Tensor, Tensor)",
)


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, **_named(*options), return_lse=True)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options_and_how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *options, deterministic, _generation = options_and_how
    named = _named(*options) | {"deterministic": deterministic}
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(q, k, v, out, dout, lse, **named)
    return dq, dk, dv


def _named(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool, left: int | None, right: int | None
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        "softmax_scale": scale, "causal": causal, "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _forward_shapes(q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, *_options: Any) -> tuple[Tensor, Tensor]:
    assert k_kGD.shape == v_kGD.shape
    return q_qHD.new_empty(q_qHD.shape), q_qHD.new_empty(q_qHD.shape[1::-1], dtype=torch.float32)


def _backward_shapes(
    dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_Hq: Tensor, *_options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    assert dout_qHD.shape == out_qHD.shape == q_qHD.shape
    assert lse_Hq.shape == q_qHD.shape[1::-1]
    dq, dk, dv = (torch.empty_like(x) for x in (q_qHD, k_kGD, v_kGD))
    return dq, dk, dv


def workspace(
    _dout: Tensor, q_qHD: Tensor, k_kGD: Tensor, _v: Tensor, _out: Tensor, _lse: Tensor, cu_q: Tensor, _cu_k: Tensor,
    max_q: int, max_k: int, _scale: float, causal: bool, left: int | None, _right: int | None, deterministic: bool,
    generation: int | None,
) -> int:  # fmt: skip
    """Return the bytes that the backward pass holds besides its results, as `_flash_attn_bwd` allocates them.

    In float32: dq, two numbers for each query and head, and dk and dv where heads share keys. Tokens are rounded up to
    whole blocks, with a block more for each segment.
    """
    (queries, heads, size), (keys, kv_heads, _) = q_qHD.shape, k_kGD.shape
    generation, segments, grouped = generation or HOPPER, len(cu_q) - 1, heads != kv_heads
    block, key_block, cluster = _blocks(size, causal or left is not None, generation)
    together = key_block * cluster
    width = _up(size, 64 if generation == HOPPER and size > 128 else 32)
    numbers = heads * (_up(queries, block) + segments * block) * (width + 2)
    if grouped:
        numbers += 2 * kv_heads * (_up(keys, together) + segments * together) * width
    if deterministic:  # semaphores, of 4 bytes too
        numbers += segments * heads * _up(max_q, block) // block * cluster
        numbers += grouped * 4 * segments * kv_heads * _up(max_k, together) // key_block
    return 4 * numbers


def _blocks(size: int, masked: bool, generation: int) -> tuple[int, int, int]:
    """Return the queries and the keys of a block, and how many blocks of keys lie together."""
    if generation == HOPPER:
        if size <= 64:
            return 128, 128, 1
        if size <= 128:
            return 64 if masked or size <= 96 else 80, 128, 1
        return 64, 96 if size <= 192 else 48, 1
    return (64, 64, 1) if generation >= 12 else (128, 128, 2 if size >= 128 else 1)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


define(_SCHEMAS[0], _forward_shapes, CUDA=forward)
define(_SCHEMAS[1], _backward_shapes, CUDA=backward)
