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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Outputs are merged and gradients added up in float32, in float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockKernel(Protocol):
    name: str

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

        Where a segment has queries but no keys, the output is 0 and the log-sum-exp −inf.
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, dk, dv in the accumulation dtype, given the *global* output and log-sum-exp."""


def segments(q_lengths: Lengths, k_lengths: Lengths) -> Iterator[tuple[slice, slice]]:
    """The slices of queries and keys of each segment that has both."""
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        if q_length and k_length:
            yield slice(q_start, q_start + q_length), slice(k_start, k_start + k_length)
        q_start += q_length
        k_start += k_length
