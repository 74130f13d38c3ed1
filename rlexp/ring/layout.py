"""What a layout answers. All but `attend` are pure functions of the pack and the ring, tested without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlexp.types import Segment

if TYPE_CHECKING:
    from rlexp.ring.attention import RingBatch
    from rlexp.ring.groups import Ring


class Part(Enum):
    """A part of a rank's share of a segment: its first chunk, its second, or both."""

    ALL = "all"
    EARLY = "early"
    LATE = "late"


ALL, EARLY, LATE = Part.ALL, Part.EARLY, Part.LATE


@dataclass(frozen=True)
class Block:
    """One call of a kernel: which of our queries meet which of the source's keys, and whether causally."""

    queries: Part
    keys: Part
    causal: bool


@dataclass(frozen=True)
class Deal:
    """Which rank holds and computes what of a pack. Of each rank:"""

    places: tuple[Tensor, ...]  # those in the pack that it holds, in the order in which it holds them
    real: tuple[int, ...]  # tokens that are no padding
    work: tuple[float, ...]  # pairs of query and key, of all heads: a rank that computes half of the heads has half


class Plan(Protocol):
    """What a layout has worked out for a rank and a pack, once for all layers of the model."""

    def to(self, device: torch.device) -> Any: ...


class Layout(Protocol):
    name: str

    def multiple(self, ring_size: int) -> int:
        """The pack is padded to a multiple of this."""

    def unit(self, ring_size: int) -> int:
        """And each of its segments to a multiple of this."""

    def deal(self, segments: Sequence[Segment], ring_size: int) -> Deal: ...

    def plan(self, segments: Sequence[Segment], ring: Ring) -> Plan: ...

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
        """The attention itself, differentiable; (t, H, D) in the dtype of the queries."""


Kept = tuple[Tensor, ...]  # what a backward pass needs of its forward pass
Grads = tuple[Tensor, Tensor, Tensor]


class Computation(Protocol):
    """Both directions of an attention that is one function to autograd."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: RingBatch, scale: float) -> tuple[Tensor, Kept]:
        """The output in the dtype of the queries."""

    def backward(self, dout: Tensor, kept: Kept, batch: RingBatch, scale: float) -> Grads:
        """dq, dk and dv in the accumulation dtype, or in that of q, k and v."""


def differentiable(
    computation: Computation, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float
) -> Tensor:
    out: Tensor = _Attention.apply(q_tHD, k_tGD, v_tGD, computation, batch, scale)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, computation: Computation, batch: RingBatch, scale: float
    ) -> Tensor:
        out, kept = computation.forward(q, k, v, batch, scale)
        ctx.save_for_backward(*kept)
        ctx.computation, ctx.batch, ctx.scale, ctx.dtypes = computation, batch, scale, (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    @once_differentiable  # the global output and log-sum-exp are constants to it, which they are not
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.computation.backward(grads[0], ctx.saved_tensors, ctx.batch, ctx.scale)
        return *(grad.to(dtype) for grad, dtype in zip(found, ctx.dtypes, strict=True)), None, None, None
