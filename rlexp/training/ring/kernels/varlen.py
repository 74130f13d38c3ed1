"""The part that the flash kernels for CUDA share: all segments in one launch, with their bounds in `cu_seqlens`.

The kernel never sees a segment without queries or without keys: versions differ in what its rows then hold (a
log-sum-exp of +∞, or memory that nobody wrote). Its tokens are left out by a view where the others are contiguous, as
in one long sequence, and by an index elsewhere.

A kernel takes one window for all segments of a launch, counted from the last query and the last key of each. So the
segments of a band are launched together where those are equally far apart, as they lie.

The kernels compute in float32 and round their results to the dtype of the queries. Merging and summing take them as
they are, into float32.

Shape letters: q query tokens, k key tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import HALF, BlockKernel, Call, Grads, readable
from rlexp.training.ring.selection import Lengths, Rows, Selection, covers
from rlexp.training.types import moved

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k, v
# dout, q, k, v, out, and a contiguous log-sum-exp (H, q) of float32.
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# For one query per sequence, as in decoding, they take another path, which swaps heads and queries. Not needed here.
FEWEST_QUERIES = 2
NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Spans:
    """One launch: the rows of its segments, the bounds of each, and how far before and after its own place, counted
    from the end, a query sees keys."""

    queries: Rows
    keys: Rows
    bounds: tuple[Tensor, Tensor, int, int]  # where queries and keys begin, and the most of each
    window: tuple[int, int] = NO_WINDOW


def spans_of(call: Call, device: torch.device) -> tuple[Spans, ...]:
    """Return the launches of a call. All layers and both passes share them, and they go with the call's pack."""
    if device not in call.prepared:
        call.prepared[device] = tuple(_spans(call, device))
    return call.prepared[device]


def _spans(call: Call, device: torch.device) -> Iterator[Spans]:
    queries, keys, apart = call.queries.lengths, call.keys.lengths, call.apart
    numbers = [number for number, both in enumerate(zip(queries, keys, strict=True)) if all(both)]
    longest = keys
    if call.window is None or apart is None:
        launches = [(NO_WINDOW, numbers)] if numbers else []
    else:  # flash-attn 2 bounds a window by the longest keys, and from the first query: so queries count among them
        launches = [((call.window - 1 - far, far), [*same]) for far, same in groupby(numbers, apart.__getitem__)]
        longest = tuple(map(max, queries, keys))
    for window, segments in launches:
        rows = [_rows(lengths, segments, device) for lengths in (queries, keys)]
        bounds = (torch.tensor([0, *map(lengths.__getitem__, segments)]).cumsum(0) for lengths in (queries, keys))
        cu_q, cu_k = (moved(each.to(torch.int32), device) for each in bounds)
        most = max(FEWEST_QUERIES, *(queries[each] for each in segments)), max(longest[each] for each in segments)
        yield Spans(rows[0], rows[1], (cu_q, cu_k, *most), window)


def _rows(lengths: Lengths, numbers: list[int], device: torch.device) -> Rows:
    """Return the rows of some segments."""
    starts = [*accumulate(lengths, initial=0)]
    return Selection((tuple(range(starts[number], starts[number + 1]) for number in numbers),)).to(device).index


def empty_grads(given: Given) -> Grads:
    """Make room for dq, dk and dv: contiguous, even where q, k and v are not."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[1:4])
    return dq, dk, dv


class Varlen(BlockKernel):
    """Flash attention over packed segments. A subclass calls its package in `call_forward` and `call_backward`."""

    dtypes = HALF

    def prepare(self, calls: Iterable[Call], device: torch.device) -> None:
        """Make the launches before the first layer, once for calls that are alike."""
        first: dict[Any, Call] = {}
        for call in calls:
            alike = (call.queries.lengths, call.keys.lengths, call.window, call.apart)
            call.prepared[device] = spans_of(first.setdefault(alike, call), device)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def ready(self, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def call_forward(self, inputs: Inputs, spans: Spans, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output (q, H, D) and log-sum-exp (H, q)."""

    @abstractmethod
    def call_backward(self, given: Given, spans: Spans, call: Call, scale: float) -> Grads:
        """Return dq, dk and dv."""

    def forward(self, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for spans in spans_of(call, q_qHD.device):
            q = readable(q_qHD[spans.queries])
            k, v = (readable(x[spans.keys]) for x in (k_kGD, v_kGD))
            out, lse = self.call_forward((q, k, v), spans, call, scale)
            outs.append((spans.queries, out))
            lses.append((spans.queries, lse.transpose(0, 1)))
        shape = q_qHD.shape[:2]
        whole_out = _together(outs, q_qHD, (*shape, v_kGD.shape[2]))
        return whole_out, _together(lses, q_qHD, shape, -torch.inf, torch.float32)

    def backward(
        self, dout_qHD: Tensor, q_qHD: Tensor, k_kGD: Tensor, v_kGD: Tensor, out_qHD: Tensor, lse_qH: Tensor,
        call: Call, scale: float,
    ) -> Grads:  # fmt: skip
        by_launch: tuple[list[tuple[Rows, Tensor]], ...] = ([], [], [])
        for spans in spans_of(call, q_qHD.device):
            dout, q, out = (readable(x[spans.queries].to(q_qHD.dtype)) for x in (dout_qHD, q_qHD, out_qHD))
            k, v = (readable(x[spans.keys]) for x in (k_kGD, v_kGD))
            lse = lse_qH[spans.queries].transpose(0, 1).contiguous()
            grads = self.call_backward((dout, q, k, v, out, lse), spans, call, scale)
            for each, rows, grad in zip(by_launch, (spans.queries, spans.keys, spans.keys), grads, strict=True):
                each.append((rows, grad))
        dq, dk, dv = (_together(f, x, x.shape) for f, x in zip(by_launch, (q_qHD, k_kGD, v_kGD), strict=True))
        return dq, dk, dv


def _together(
    results: list[tuple[Rows, Tensor]], like: Tensor, shape: Sequence[int], rest: float = 0.0, dtype: Any = None
) -> Tensor:
    """Put what launches computed into their rows; the others have `rest`."""
    if len(results) == 1 and covers(results[0][0], shape[0]):
        return results[0][1]
    whole = like.new_full(shape, rest, dtype=dtype)
    for rows, values in results:
        whole[rows] = values
    return whole
