"""Packs that are forests of segments, and their attention in float64 with the whole score matrix.

No code of `rlexp/training/ring` is used but the segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlexp.training.types import Segment


def forest_of(trees: Sequence[tuple[int, int | None]]) -> tuple[Segment, ...]:
    """Lay segments end to end, each given by its length and its parent."""
    segments, start = [], 0
    for length, parent in trees:
        segments.append(Segment(start, length, length, parent))
        start += length
    return tuple(segments)


def seen(segments: Sequence[Segment], window: int | None) -> Tensor:
    """Return (T, T): which key each query of the pack sees, found token by token."""
    places: list[list[int]] = []  # of each segment and its ancestors, in the order of their positions
    total = sum(segment.padded for segment in segments)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for segment in segments:
        before = places[segment.parent] if segment.parent is not None else []
        places.append([*before, *range(segment.start, segment.start + segment.length)])
        for position in range(len(before), len(places[-1])):
            first = max(0, position + 1 - (window or total))
            mask[places[-1][position], places[-1][first : position + 1]] = True
    return mask


def dense(segments: Sequence[Segment], window: int | None, inputs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Return out, dq, dk and dv of a pack by one masked softmax."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    mask, groups = seen(segments, window), q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)  # padding sees nothing
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]
