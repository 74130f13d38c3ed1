"""The interface of a block kernel, and the merge of its outputs.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Lengths = tuple[int, ...]
Rows = slice | Tensor
Grads = tuple[Tensor, Tensor, Tensor]
HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
ANY: tuple[torch.dtype, ...] = (*HALF, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outputs are merged and gradients summed: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Call:
    """Segments, which lie one after the other and never meet: how many queries and keys each has, and how they attend.

    In a causal call both lengths are the same.
    """

    q_lengths: Lengths
    k_lengths: Lengths
    causal: bool
    scale: float


class BlockKernel(Protocol):
    name: str
    dtypes: tuple[torch.dtype, ...]  # of queries, keys and values

    def prepare(self, q_lengths: Lengths, k_lengths: Lengths, device: torch.device) -> None:
        """Copy to the device what calls over these segments need there, before the first of them."""

    def ready(self, x: Tensor) -> Tensor:
        """Convert a tensor that several blocks need once, to the dtype in which this kernel computes."""

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output (q, H, D) and log-sum-exp (q, H).

        The log-sum-exp is in the accumulation dtype; the output may be in that of the queries.

        Where a segment has queries but no keys, the output is 0 and the log-sum-exp −inf.
        """

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor, call: Call
    ) -> Grads:
        """Return this block's part of dq, dk, dv, in the accumulation dtype or in that of the queries.

        Output and log-sum-exp are the *global* ones.
        """


def segments(call: Call) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of queries and keys of each segment that has both."""
    q_start = k_start = 0
    for q_length, k_length in zip(call.q_lengths, call.k_lengths, strict=True):
        if q_length and k_length:
            yield slice(q_start, q_start + q_length), slice(k_start, k_start + k_length)
        q_start += q_length
        k_start += k_length


def merge_plain(out_qHD: Tensor, lse_qH: Tensor, block_out_qHD: Tensor, block_lse_qH: Tensor) -> None:
    """Add a block to the running output and log-sum-exp of the same queries, in place.

    Each output is weighted by its share of the softmax sum. A block in which a query sees no key (−inf) adds nothing.
    """
    share = torch.sigmoid(block_lse_qH - lse_qH).masked_fill_(block_lse_qH.isneginf(), 0.0)
    out_qHD.lerp_(block_out_qHD.to(out_qHD.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse_qH, block_lse_qH, out=lse_qH)
