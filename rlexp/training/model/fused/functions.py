"""The fused pieces as functions to autograd, whose forward and backward pass are one operator each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlexp.training.model.fused import operators  # noqa: F401 — defines them

ours = torch.ops.rlexp


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and x again: what uses x afterwards, as the residual stream does, sends its gradient back
    through this function, which adds the two up as it goes."""
    out, again = _Norm.apply(x, weight, eps, offset)
    return out, again


def added_and_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream; return the norm of the sum, and the sum."""
    out, total = _AddNorm.apply(x, residual, weight, eps, offset)
    return out, total


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _Rotate.apply(q, k, cos, sin)
    return q, k


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out: Tensor = _Gate.apply(gate, up, kind)
    return out


def _rows(x: Tensor) -> Tensor:
    """View as rows of the last dimension, laid one after the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _strided_rows(x: Tensor) -> Tensor:
    """View as rows of the last dimension, each of which is contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


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
        q, k = ours.rotate(_read(q), _read(k), _read(cos), _read(sin), False)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = ours.rotate(_read(dq), _read(dk), _read(cos), _read(sin), True)
        return dq, dk, None, None


def _read(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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
