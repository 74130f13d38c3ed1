"""Attention as one function to autograd, whose forward and backward pass are both written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlexp.training.ring.kernels.base import Ask, Grads

Kept = tuple[Tensor, ...]  # the tensors that a backward pass needs from its forward pass


class Attention(ABC):
    """Attention over a ring. A subclass computes both passes.

    Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:
        """Return the output in the dtype of the queries, and what the backward pass needs."""

    @abstractmethod
    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:
        """Return dq, dk and dv in the accumulation dtype, or in the dtype of q, k and v."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        out: Tensor = _BothPasses.apply(q_tHD, k_tGD, v_tGD, self, ask)
        return out


class _BothPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: Attention, ask: Ask) -> Tensor:
        out, kept = attention.forward(q, k, v, ask)
        ctx.save_for_backward(*kept)
        ctx.attention, ctx.ask, ctx.dtypes = attention, ask, (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    @once_differentiable  # it takes the global output and log-sum-exp for constants, which they are not
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dqkv = ctx.attention.backward(grads[0], ctx.saved_tensors, ctx.ask)
        return *(grad.to(dtype) for grad, dtype in zip(dqkv, ctx.dtypes, strict=True)), None, None
