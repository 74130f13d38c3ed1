"""The fused pieces as operators of torch, so that a rehearsal counts them: Triton's kernels on a GPU. And as functions
to autograd, whose forward and backward pass are one operator each.

On a CPU they are plain torch, or Triton's kernels in its interpreter where TRITON_INTERPRET=1 says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlexp.training.model.fused import plain
from rlexp.training.model.fused.plain import parts_of, tokens_first, wide
from rlexp.training.ring.kernels.base import readable
from rlexp.training.ring.kernels.own_operators import define


@functools.cache
def triton_kernels() -> Any:
    """Import the kernels on first use: Triton takes seconds, and a CPU build of torch has none."""
    from rlexp.training.model.fused import triton_kernels

    return triton_kernels


def _on_cpu() -> Any:
    return triton_kernels() if os.environ.get("TRITON_INTERPRET") == "1" else plain


def _norm_backward_shapes(
    _dout: Tensor, _dtotal: Tensor | None, x: Tensor, _weight: Tensor, _scale: Tensor, _offset: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    parts, _ = parts_of(*x.shape)
    return torch.empty_like(x), x.new_empty(parts if of_weight else 0, x.shape[1], dtype=wide(x.dtype))


def _read_logits_shapes(logits: Tensor, _targets: Tensor, _temperature: float, *more: bool) -> tuple[Tensor, ...]:
    asked = (True, True, True, *more)
    return tuple(logits.new_empty(len(logits) if each else 0, dtype=wide(logits.dtype)) for each in asked)


_DEFINED: dict[str, Callable[..., Any]] = {
    "norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)":
        lambda x, *_: (torch.empty_like(x), x.new_empty(len(x), dtype=wide(x.dtype))),
    "add_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)":
        lambda x, total, *_: (torch.empty_like(x), torch.empty_like(total), x.new_empty(len(x), dtype=wide(x.dtype))),
    "norm_backward(Tensor dout, Tensor? dtotal, Tensor x, Tensor weight, Tensor scale, float offset, bool of_weight) "
    "-> (Tensor, Tensor)": _norm_backward_shapes,
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)":
        lambda q, k, *_: (tokens_first(q), tokens_first(k)),
    "gate(Tensor gate, Tensor up, str kind) -> Tensor": lambda gate, *_: gate.new_empty(gate.shape),
    "gate_backward(Tensor dout, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)":
        lambda _dout, gate, up, *_: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    "read_logits(Tensor logits, Tensor targets, float temperature, bool entropy, bool likelihood, bool hit) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": _read_logits_shapes,
    "logits_backward(Tensor(a!) logits, Tensor targets, Tensor norm, Tensor dlogps, Tensor? entropy, Tensor? dentropy, "
    "float temperature) -> ()": lambda *_: None,
}  # fmt: skip

for _schema, _shapes in _DEFINED.items():
    _name = _schema.partition("(")[0]
    define(
        _schema,
        _shapes,
        CPU=lambda *given, name=_name: getattr(_on_cpu(), name)(*given),
        CUDA=lambda *given, name=_name: getattr(triton_kernels(), name)(*given),
    )


# ---- functions to autograd ----

ours = torch.ops.rlexp


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and x again: what uses x afterwards, as the residual stream does, sends its gradient back
    through this function, which adds the two up as it goes."""
    return _Norm.apply(x, weight, eps, offset)


def added_and_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream; return the norm of the sum, and the sum."""
    return _AddNorm.apply(x, residual, weight, eps, offset)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _Rotate.apply(q, k, cos, sin)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _Gate.apply(gate, up, kind)


def _rows(x: Tensor) -> Tensor:
    """View as rows of the last dimension, laid one after the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _strided_rows(x: Tensor) -> Tensor:
    """View as rows of the last dimension, each of which is contiguous."""
    return readable(x.reshape(-1, x.shape[-1]))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        out, scale = ours.norm(_rows(x), weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return out.view(x.shape), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dagain: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight = _norm_gradients(ctx, dout, dagain)
        return dx, dweight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        out, total, scale = ours.add_norm(_rows(x), _rows(residual), weight, eps, offset)
        total = total.view(x.shape)
        ctx.save_for_backward(total, weight, scale)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return out.view(x.shape), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight = _norm_gradients(ctx, dout, dtotal)
        return dx, dx, dweight, None, None


def _norm_gradients(ctx: Any, dout: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of what was normed and of the weight. `beside` is what the residual stream sends back."""
    if dout is None:
        return beside, None
    x, weight, scale = ctx.saved_tensors
    of_weight = ctx.needs_input_grad[-3]
    along = None if beside is None else _rows(beside)
    dx, parts = ours.norm_backward(_rows(dout), along, _rows(x), weight, scale, ctx.offset, of_weight)
    return dx.view(x.shape), parts.sum(0).to(weight.dtype) if of_weight else None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return ours.rotate(*map(readable, (q, k, cos, sin)), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = ours.rotate(*map(readable, (dq, dk, cos, sin)), True)
        return dq, dk, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        out: Tensor = ours.gate(_strided_rows(gate), _strided_rows(up), kind)
        return out.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = ours.gate_backward(_rows(dout), _strided_rows(gate), _strided_rows(up), ctx.kind)
        return dgate.view(gate.shape), dup.view(up.shape), None
