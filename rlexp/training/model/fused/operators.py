"""The fused pieces as operators of torch, so that a rehearsal counts them: Triton's kernels on a GPU.

On a CPU they are plain torch, or Triton's kernels in its interpreter where TRITON_INTERPRET=1 says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlexp.training.model.fused import plain
from rlexp.training.model.fused.plain import parts_of, tokens_first, wide
from rlexp.training.ring.kernels.own_operators import define


@functools.cache
def triton_kernels() -> Any:
    """Import the kernels on first use: Triton takes seconds, and a CPU build of torch has none."""
    from rlexp.training.model.fused import triton_kernels

    return triton_kernels


def _on_cpu() -> Any:
    return triton_kernels() if os.environ.get("TRITON_INTERPRET") == "1" else plain


def _norm_shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(len(x), dtype=wide(x.dtype))


def _add_norm_shapes(x: Tensor, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, scale = _norm_shapes(x)
    return out, torch.empty_like(residual), scale


def _norm_backward_shapes(
    _dout: Tensor, _dtotal: Tensor | None, x: Tensor, _weight: Tensor, _scale: Tensor, _offset: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    parts, _ = parts_of(*x.shape)
    return torch.empty_like(x), x.new_empty(parts if of_weight else 0, x.shape[1], dtype=wide(x.dtype))


def _rotate_shapes(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tokens_first(q), tokens_first(k)


def _gate_shapes(gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def _gate_backward_shapes(_dout: Tensor, gate: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _read_logits_shapes(logits: Tensor, _targets: Tensor, _temperature: float, *more: bool) -> tuple[Tensor, ...]:
    asked = (True, True, True, *more)
    return tuple(logits.new_empty(len(logits) if each else 0, dtype=wide(logits.dtype)) for each in asked)


def _logits_backward_shapes(*_: Any) -> None:
    return None


_DEFINED: dict[str, Callable[..., Any]] = {
    "norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)": _norm_shapes,
    "add_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)":
        _add_norm_shapes,
    "norm_backward(Tensor dout, Tensor? dtotal, Tensor x, Tensor weight, Tensor scale, float offset, bool of_weight) "
    "-> (Tensor, Tensor)": _norm_backward_shapes,
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)": _rotate_shapes,
    "gate(Tensor gate, Tensor up, str kind) -> Tensor": _gate_shapes,
    "gate_backward(Tensor dout, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)": _gate_backward_shapes,
    "read_logits(Tensor logits, Tensor targets, float temperature, bool entropy, bool likelihood, bool hit) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _read_logits_shapes,
    "logits_backward(Tensor(a!) logits, Tensor targets, Tensor norm, Tensor dlogps, Tensor? entropy, Tensor? dentropy, "
    "float temperature) -> ()": _logits_backward_shapes,
}  # fmt: skip

for _schema, _shapes in _DEFINED.items():
    _name = _schema.partition("(")[0]
    define(
        _schema,
        _shapes,
        CPU=lambda *given, name=_name: getattr(_on_cpu(), name)(*given),
        CUDA=lambda *given, name=_name: getattr(triton_kernels(), name)(*given),
    )
