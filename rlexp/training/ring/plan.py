"""One rank's attention over a ring, as it was planned: its calls step by step, with what a transport brings.

Outputs are merged in float32 by log-sum-exp, and dq, dk and dv are summed in float32. Every call of a backward pass is
given the global output and log-sum-exp. Each part of the queries is selected once a layer, and has its own running
output and its own dq; they are put together at the end. What has one summand alone is neither widened nor copied.

Shape letters: t tokens of this rank, q queries of a part, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.attention import Attention, Found, Kept
from rlexp.training.ring.kernels.base import Ask, BlockKernel, Call, Grads, Rows, accumulation_dtype
from rlexp.training.ring.kernels.fused import merge_rows
from rlexp.training.ring.meetings import Meeting, Part, Planner, planned
from rlexp.training.ring.selection import covers, put, select
from rlexp.training.ring.transports.base import ALL, Given, Transport
from rlexp.training.world.groups import Ring


@dataclass(frozen=True)
class RingPlan(Attention):
    kernel: BlockKernel
    transport: Transport
    parts: tuple[Part, ...]  # of our queries; together they have every real token
    steps: tuple[tuple[Meeting, ...], ...]

    def to(self, device: torch.device) -> RingPlan:
        for meeting in (each for step in self.steps for each in step):
            self.kernel.prepare(self.call(meeting, 1.0), device)
        parts = tuple(replace(part, queries=part.queries.to(device)) for part in self.parts)
        steps = tuple(tuple(replace(each, keys=each.keys.to(device)) for each in step) for step in self.steps)
        return replace(self, transport=self.transport.to(device), parts=parts, steps=steps)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Kept]:
        k, v = self.transport.ready(k), self.transport.ready(v)
        queries = [select(self.kernel.ready(q), part.queries.index) for part in self.parts]
        outs = _Running(self.parts, accumulation_dtype(q.dtype), merge_rows)
        for heads, step, keys, values in self.transport.keys(k, v):
            ours = _serving(heads, q, k)
            for meeting in self.steps[step]:
                rows = meeting.keys.index
                mine, call = queries[meeting.part][:, ours], self.call(meeting, ask.scale)
                outs.add(meeting.part, ours, *self.kernel.forward(mine, select(keys, rows), select(values, rows), call))
            del keys, values  # while the next ones come, these go
        out, lse = outs.joined(q, ((q.shape[1], v.shape[2]), 0.0), (q.shape[1:2], -torch.inf))
        result = out.to(q.dtype)
        return result, (q, k, v, result, lse)

    def again(self, q: Tensor, k: Tensor, v: Tensor, found: Found) -> tuple[Tensor, Kept]:
        out, lse = found
        return out, (q, self.transport.ready(k), self.transport.ready(v), out, lse)

    def backward(self, dout: Tensor, kept: Kept, ask: Ask) -> Grads:
        q, k, v, out, lse = kept
        wholes = [self.kernel.ready(x) for x in (dout, q, out)]
        indices = [part.queries.index for part in self.parts]
        known = [[*(select(x, index) for x in wholes), _by_head(lse, index)] for index in indices]
        dqs = _Running(self.parts, accumulation_dtype(q.dtype), Tensor.add_)
        home = self.transport.home(k, v, self.kernel)
        for heads, step, keys, values in self.transport.keys(k, v):
            ours, given = _serving(heads, q, k), []
            for meeting in self.steps[step]:
                rows, call = meeting.keys.index, self.call(meeting, ask.scale)
                dout_q, q_q, out_q, lse_q = (x[:, ours] for x in known[meeting.part])
                dq, dk, dv = self.kernel.backward(
                    dout_q, q_q, select(keys, rows), select(values, rows), out_q, lse_q, call
                )
                dqs.add(meeting.part, ours, dq)
                given.append(Given(rows, dk, dv, meeting.once))
            del keys, values
            home.add(heads, step, given)
        (dq,) = dqs.joined(q, (q.shape[1:], 0.0))
        return dq, *home.total()

    def call(self, meeting: Meeting, scale: float) -> Call:
        lengths = self.parts[meeting.part].queries.lengths
        return Call(lengths, meeting.keys.lengths, meeting.causal, scale, meeting.window, meeting.apart)


def plan_of(
    planner: Planner, ring: Ring, kernel: BlockKernel, transport: Callable[[Planner, Ring], Transport]
) -> RingPlan:
    way = transport(planner, ring)
    return RingPlan(kernel, way, *planned([(planner.met(ring.rank, *each.sent), each) for each in way.arrivals]))


def _serving(heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that these key/value heads serve."""
    each = q.shape[1] // k.shape[1]
    return heads if heads == ALL else slice(heads.start * each, heads.stop * each)


def _by_head(lse_tH: Tensor, rows: Rows) -> Tensor:
    """Select log-sum-exps, and lay one head after the other in memory, as kernels for GPUs read them."""
    return select(lse_tH, rows).transpose(0, 1).contiguous().transpose(0, 1)


class _Running:
    """Results of each part of our queries while calls add to them: outputs with log-sum-exps, or gradients."""

    def __init__(self, parts: Sequence[Part], wide: torch.dtype, combine: Callable[..., object]) -> None:
        self.parts, self.wide, self.combine = parts, wide, combine
        self.held: list[dict[int | None, list[Tensor]]] = [{} for _ in parts]  # by the first of their heads

    def add(self, part: int, heads: slice, *results: Tensor) -> None:
        held = self.held[part]
        if heads.start not in held:
            held[heads.start] = [*results]
            return
        held[heads.start] = known = [x.to(self.wide) for x in held[heads.start]]
        self.combine(*known, *results)

    def joined(self, q: Tensor, *nothing: tuple[Sequence[int], float]) -> list[Tensor]:
        """Lay the results where the shard has the queries; where it has none, `nothing`: a row's shape, and a value."""
        found = [_together([*held.values()]) for held in self.held]
        wide = self.wide if not found or not all(part.first for part in self.parts) else None
        begun = bool(found) and covers(self.parts[0].queries.index, len(q))
        if begun:
            whole = [x.to(wide or x.dtype) for x in found[0]]
        else:
            gaps = sum(part.queries.count for part in self.parts if part.first) < len(q)
            dtypes = [wide or x.dtype for x in found[0]] if found else [self.wide] * len(nothing)
            whole = [
                q.new_full((len(q), *shape), value, dtype=dtype) if gaps else q.new_empty(len(q), *shape, dtype=dtype)
                for dtype, (shape, value) in zip(dtypes, nothing, strict=True)
            ]
        for part, results in [*zip(self.parts, found, strict=True)][begun:]:
            rows = part.queries.index
            if not part.first:
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
