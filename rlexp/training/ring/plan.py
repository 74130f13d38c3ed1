"""One rank's attention over a ring, as it was planned: its calls step by step, with what a transport brings.

Outputs are merged in float32 by log-sum-exp, and dq, dk and dv are summed in float32. Every call of a backward pass is
given the global output and log-sum-exp. Calls share a few orders of the queries. The queries of each are selected once
a layer, and have a running output and a dq; they are put together at the end. What has one summand alone is neither
widened nor copied.

Shape letters: t tokens of this rank, q queries of an order, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rlexp.training.ring.attention import Attended, Attention, Kept
from rlexp.training.ring.kernels.base import Ask, BlockKernel, Call, Grads, accumulation_dtype
from rlexp.training.ring.kernels.fused import merge_rows
from rlexp.training.ring.selection import Rows, Selection, covers, put, select
from rlexp.training.ring.transports.base import ALL, Transport


@dataclass(frozen=True)
class RingPlan(Attention):
    kernel: BlockKernel
    transport: Transport
    orders: Mapping[Selection, bool]  # of our queries, with every real token; whether no order before has any of these
    steps: tuple[tuple[Call, ...], ...]

    def to(self, device: torch.device) -> RingPlan:
        moved = {order: order.to(device) for order in self.orders}
        steps = tuple(tuple(call.of(moved[call.queries], call.keys.to(device)) for call in step) for step in self.steps)
        self.kernel.prepare(chain.from_iterable(steps), device)
        orders = {moved[order]: first for order, first in self.orders.items()}
        return RingPlan(self.kernel, self.transport.to(device), orders, steps)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:
        k, v = self.transport.ready(k), self.transport.ready(v)
        queries = {order: select(self.kernel.ready(q), order.index) for order in self.orders}
        outs = _Running(self.orders, accumulation_dtype(q.dtype), merge_rows)
        for heads, step, keys, values in self.transport.keys(k, v):
            ours = _serving(heads, q, k)
            for call in self.steps[step]:
                rows, our_q, how = call.keys.index, queries[call.queries][:, ours], (call, ask.scale)
                outs.add(
                    call.queries, ours, *self.kernel.forward(our_q, select(keys, rows), select(values, rows), *how)
                )
            del keys, values  # while the next ones come, these go
        out, lse = outs.joined(q, ((q.shape[1], v.shape[2]), 0.0), (q.shape[1:2], -torch.inf))
        result = out.to(q.dtype)
        return result, (q, k, v, result, lse)

    def again(self, q: Tensor, k: Tensor, v: Tensor, attended: Attended) -> tuple[Tensor, Kept]:
        out, lse = attended
        return out, (q, self.transport.ready(k), self.transport.ready(v), out, lse)

    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:
        q, k, v, out, lse = kept
        wholes = [self.kernel.ready(x) for x in (dout, q, out)]
        of_order = {
            order: [*(select(x, order.index) for x in wholes), _by_head(lse, order.index)] for order in self.orders
        }
        dqs = _Running(self.orders, accumulation_dtype(q.dtype), Tensor.add_)
        home = self.transport.home(k, v, self.kernel)
        for heads, step, keys, values in self.transport.keys(k, v):
            ours, grads = _serving(heads, q, k), []
            for call in self.steps[step]:
                rows, (dout_q, q_q, out_q, lse_q) = call.keys.index, (x[:, ours] for x in of_order[call.queries])
                dq, dk, dv = self.kernel.backward(
                    dout_q, q_q, select(keys, rows), select(values, rows), out_q, lse_q, call, ask.scale
                )
                dqs.add(call.queries, ours, dq)
                grads.append((call, dk, dv))
            del keys, values
            home.add(heads, step, grads)
        (dq,) = dqs.joined(q, (q.shape[1:], 0.0))
        return dq, *home.total()


def _serving(heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that these key/value heads serve."""
    each = q.shape[1] // k.shape[1]
    return heads if heads == ALL else slice(heads.start * each, heads.stop * each)


def _by_head(lse_tH: Tensor, rows: Rows) -> Tensor:
    """Select log-sum-exps, and lay one head after the other in memory, as kernels for GPUs read them."""
    return select(lse_tH, rows).transpose(0, 1).contiguous().transpose(0, 1)


class _Running:
    """Results of each order of our queries while calls add to them: outputs with log-sum-exps, or gradients."""

    def __init__(self, orders: Mapping[Selection, bool], wide: torch.dtype, combine: Callable[..., object]) -> None:
        self.orders, self.wide, self.combine = orders, wide, combine
        self.held: dict[Selection, dict[int | None, list[Tensor]]] = {each: {} for each in orders}  # by the first head

    def add(self, order: Selection, heads: slice, *results: Tensor) -> None:
        held = self.held[order]
        if heads.start not in held:
            held[heads.start] = [*results]
            return
        held[heads.start] = known = [x.to(self.wide) for x in held[heads.start]]
        self.combine(*known, *results)

    def joined(self, q: Tensor, *nothing: tuple[Sequence[int], float]) -> list[Tensor]:
        """Lay the results where the shard has the queries; where it has none, `nothing`: a row's shape, and a value."""
        of_orders = [_together([*held.values()]) for held in self.held.values()]
        wide = self.wide if not of_orders or not all(self.orders.values()) else None
        begun = bool(of_orders) and covers(next(iter(self.orders)).index, len(q))
        if begun:
            whole = [x.to(wide or x.dtype) for x in of_orders[0]]
        else:
            gaps = sum(order.count for order, first in self.orders.items() if first) < len(q)
            dtypes = [wide or x.dtype for x in of_orders[0]] if of_orders else [self.wide] * len(nothing)
            whole = [
                q.new_full((len(q), *shape), value, dtype=dtype) if gaps else q.new_empty(len(q), *shape, dtype=dtype)
                for dtype, (shape, value) in zip(dtypes, nothing, strict=True)
            ]
        for (order, first), results in [*zip(self.orders.items(), of_orders, strict=True)][begun:]:
            rows = order.index
            if not first:
                known = [select(x, rows) for x in whole]
                self.combine(*known, *results)
                if isinstance(rows, slice):
                    continue  # these are views
                results = known
            for into, result in zip(whole, results, strict=True):
                put(into, rows, result)
        return whole


def _together(by_heads: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    return by_heads[0] if len(by_heads) == 1 else [torch.cat(each, dim=1) for each in zip(*by_heads, strict=True)]
