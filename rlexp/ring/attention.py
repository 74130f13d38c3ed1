"""Attention over a ring: what it needs to know of the batch, and the door to the layout that computes it.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel
from rlexp.ring.layouts import Layout
from rlexp.types import Segment


@dataclass(frozen=True)
class RingBatch:
    """What attention needs to know of the batch. Travels as a keyword argument of the model's forward call."""

    ring: Ring
    layout: Layout
    kernel: BlockKernel
    plan: Any  # the layout's own
    max_length: int  # of any sequence of the run: windows shorter than this are refused

    def to(self, device: torch.device) -> RingBatch:
        return replace(self, plan=self.plan.to(device))


def ring_batch(
    segments: Sequence[Segment], ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int
) -> RingBatch:
    if any(segment.parent is not None for segment in segments):
        # The types carry the forest; a child's block over its parent is the one call that is not made yet.
        raise NotImplementedError("segments with a parent are not attended to yet")
    return RingBatch(ring, layout, kernel, layout.plan(segments, ring), max_length)


def ring_attention(q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, batch: RingBatch, scale: float) -> Tensor:
    """Causal attention of each segment to itself over the whole ring; (t, H, D) in the dtype of the queries."""
    return batch.layout.attend(q_tHD, k_tGD, v_tGD, batch, scale)
