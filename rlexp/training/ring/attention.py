"""Attention as one function to autograd, whose forward and backward pass are both written out.

A layer that is computed again in the backward pass need not attend again: `KeptOutputs` holds what its attention gave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlexp.launch import watch
from rlexp.training.ring.kernels.base import Ask, Grads

# What a backward pass needs from its forward pass: queries, keys and values as they were attended to, and what is found
# by attending, the output and its log-sum-exp.
Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attended = tuple[Tensor, Tensor]


class Attention(ABC):
    """Attention over a ring. A subclass computes both passes.

    Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:
        """Return the output in the dtype of the queries, and what the backward pass needs."""

    @abstractmethod
    def again(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended) -> tuple[Tensor, Kept]:
        """Return the same as `forward` from what it found: nothing is attended to again."""

    @abstractmethod
    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:
        """Return dq, dk and dv in the accumulation dtype, or in the dtype of q, k and v."""

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        return _BothPasses.apply(q_tHD, k_tGD, v_tGD, self, ask)


class _BothPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: Attention, ask: Ask) -> Tensor:
        watch.note()
        if (known := _USING.get()) is not None:
            out, kept = attention.again(q, k, v, next(known))
        else:
            out, kept = attention.forward(q, k, v, ask)
            if (store := _KEEPING.get()) is not None:
                store.add(*kept[3:])
        ctx.save_for_backward(*kept)
        ctx.attention, ctx.ask, ctx.dtypes = attention, ask, (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    @once_differentiable  # it takes the global output and log-sum-exp for constants, which they are not
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        watch.note()
        dqkv = ctx.attention.backward(grads[0], ctx.saved_tensors, ctx.ask)
        return *(grad.to(dtype) for grad, dtype in zip(dqkv, ctx.dtypes, strict=True)), None, None


# ---- layers that are computed again ----

_KEEPING: ContextVar[KeptOutputs | None] = ContextVar("keeping", default=None)
_USING: ContextVar[Iterator[Attended] | None] = ContextVar("using", default=None)


class KeptOutputs:
    """What the attention of one call of a layer found: kept as it is computed, and used whenever it is computed again.

    Without their history: else an output would hold the graph that holds it.
    """

    def __init__(self) -> None:
        self.kept: list[Attended] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        self.kept.append((out.detach(), lse.detach()))

    def keeping(self) -> AbstractContextManager[None]:
        return _During(_KEEPING, lambda: self)

    def using(self, within: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Return the context of a recomputation, which takes place within another."""
        return _During(_USING, lambda: ((out.detach(), lse.detach()) for out, lse in self.kept), within)


class _During(AbstractContextManager[None]):
    """A context in which a variable has a value, made anew whenever it is entered."""

    def __init__(
        self, variable: ContextVar[Any], value: Callable[[], Any], within: AbstractContextManager[Any] | None = None
    ) -> None:
        self.variable, self.value = variable, value
        self.within = nullcontext() if within is None else within
        self.before: list[Token[Any]] = []

    def __enter__(self) -> None:
        self.within.__enter__()
        self.before.append(self.variable.set(self.value()))

    def __exit__(self, *error: Any) -> None:
        self.variable.reset(self.before.pop())
        self.within.__exit__(*error)
