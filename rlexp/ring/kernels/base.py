"""What a block kernel answers.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size. Tokens of several
segments lie one after the other; `q_lengths` and `k_lengths` say where they end, and segments never meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

Lengths = Sequence[int]
Grads = tuple[Tensor, Tensor, Tensor]
HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
ANY: tuple[torch.dtype, ...] = (*HALF, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Outputs are merged and gradients added up in float32, in float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockKernel(Protocol):
    name: str
    dtypes: tuple[torch.dtype, ...]  # of queries, keys and values

    def ready(self, x: Tensor) -> Tensor:
        """As this kernel computes with it: what several blocks need is converted once, and not in each of them."""

    def forward(
        self,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output (q, H, D) and log-sum-exp (q, H), in the accumulation dtype.

        In a causal call both lengths are the same. Where a segment has queries but no keys, the output is 0 and the
        log-sum-exp −inf.
        """

    def backward(
        self,
        dout_qHD: Tensor,
        q_qHD: Tensor,
        k_kGD: Tensor,
        v_kGD: Tensor,
        out_qHD: Tensor,
        lse_qH: Tensor,
        q_lengths: Lengths,
        k_lengths: Lengths,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        """This block's part of dq, dk, dv in the accumulation dtype, given the *global* output and log-sum-exp."""


def segments(q_lengths: Lengths, k_lengths: Lengths) -> Iterator[tuple[slice, slice]]:
    """The slices of queries and keys of each segment that has both."""
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        if q_length and k_length:
            yield slice(q_start, q_start + q_length), slice(k_start, k_start + k_length)
        q_start += q_length
        k_start += k_length


def merge_rows(out_qHD: Tensor, lse_qH: Tensor, block_out_qHD: Tensor, block_lse_qH: Tensor) -> None:
    """Add a block to the running output and log-sum-exp of the same queries, in place, weighting both by their share of
    the softmax sum.

    Every query must have seen a key before; a block in which it sees none (−inf) then adds nothing.
    """
    share = torch.sigmoid(block_lse_qH - lse_qH)
    out_qHD.lerp_(block_out_qHD, share.unsqueeze(-1))
    torch.logaddexp(lse_qH, block_lse_qH, out=lse_qH)
