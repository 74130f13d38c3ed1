"""The interface of a block kernel, and the merge of its outputs.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.selection import Lengths, Selection, disjoint

Seen = tuple[int, int | None]  # a, w: query i sees key j if i − j + a is at least 0 and less than w
Grads = tuple[Tensor, Tensor, Tensor]
HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
ANY: tuple[torch.dtype, ...] = (*HALF, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outputs are merged and gradients summed: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Ask:
    """What a layer of a model asks of its attention."""

    scale: float
    window: int | None = None  # a query sees so many positions, its own included; None: all up to its own
    cap: float | None = None  # scores are capped softly at this size
    sinks: bool = False  # beside the keys, each head has a score of its own


def refused(ask: Ask) -> str | None:
    """Say what of a layer's request no kernel computes yet."""
    if ask.cap is not None:
        return f"scores that are capped softly at {ask.cap:g}"
    return "attention sinks" if ask.sinks else None


@dataclass(frozen=True, eq=False)
class Call:
    """Segments, which lie one after the other and never meet: the queries and keys of each, and how they attend.

    In a causal call both are equally many. In a band, `apart` says for each segment how many positions the last query
    is after the last key. A query sees the keys that are not after it, and fewer than `window` positions before. In a
    band every query sees a key.
    """

    queries: Selection
    keys: Selection
    causal: bool
    window: int | None = None
    apart: Lengths | None = None
    prepared: dict[torch.device, Any] = field(default_factory=dict, init=False)  # by a kernel, of such calls

    def __post_init__(self) -> None:
        assert (self.window is None) == (self.apart is None)
        assert not (self.causal and self.apart)

    @cached_property
    def once(self) -> bool:
        """Say whether no key stands twice, so that the call's gradients are sums already."""
        return disjoint(chain.from_iterable(self.keys.segments))

    def of(self, queries: Selection, keys: Selection) -> Call:
        """Return the same call of other rows."""
        return Call(queries, keys, self.causal, self.window, self.apart)

    def seen(self, number: int) -> Seen | None:
        """Return which keys the queries of a segment see; None: all."""
        if self.apart is not None:
            return self.apart[number] + self.keys.lengths[number] - self.queries.lengths[number], self.window
        return (0, None) if self.causal else None


class BlockKernel(ABC):
    """One call of a kernel is a block: some queries with some keys."""

    name: str
    dtypes: tuple[torch.dtype, ...] = ANY  # of queries, keys and values
    generation: int | None = None  # of the GPU: its major compute capability

    def refuses(self, ask: Ask) -> str | None:
        """Say what of a layer's request this kernel does not compute."""
        return refused(ask)

    def prepare(self, calls: Iterable[Call], device: torch.device) -> None:  # noqa: B027
        """Copy to the device what these calls need there, before the first of them."""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of dk and dv for queries, keys and values of this dtype."""
        return accumulation_dtype(dtype)

    def ready(self, x: Tensor) -> Tensor:
        """Convert a tensor that several blocks need once, to the dtype in which this kernel computes."""
        return x.to(accumulation_dtype(x.dtype))

    @abstractmethod
    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output (q, H, D) and log-sum-exp (q, H).

        The log-sum-exp is in the accumulation dtype; the output may be in that of the queries. Where a segment has
        queries but no keys, the output is 0 and the log-sum-exp −inf.
        """

    @abstractmethod
    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor,
        call: Call, scale: float,
    ) -> Grads:  # fmt: skip
        """Return this block's part of dq, dk, dv, in the accumulation dtype or in that of the queries.

        Output and log-sum-exp are the *global* ones.
        """


def readable(x: Tensor) -> Tensor:
    """Make each head's elements contiguous: flash kernels take them for it, whatever their stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def segments(call: Call) -> Iterator[tuple[slice, slice, Seen | None]]:
    """Yield the slices of queries and keys of each segment that has both, and which of the keys the queries see."""
    q_start = k_start = 0
    for number, (q_length, k_length) in enumerate(zip(call.queries.lengths, call.keys.lengths, strict=True)):
        if q_length and k_length:
            yield slice(q_start, q_start + q_length), slice(k_start, k_start + k_length), call.seen(number)
        q_start += q_length
        k_start += k_length


def merge_plain(out_qHD: Tensor, lse_qH: Tensor, block_out_qHD: Tensor, block_lse_qH: Tensor) -> None:
    """Add a block to the running output and log-sum-exp of the same queries, in place.

    Each output is weighted by its share of the softmax sum. A block in which a query sees no key (−inf) adds nothing.
    """
    share = torch.sigmoid(block_lse_qH - lse_qH).masked_fill_(block_lse_qH.isneginf(), 0.0)
    out_qHD.lerp_(block_out_qHD.to(out_qHD.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse_qH, block_lse_qH, out=lse_qH)
