"""Defects of shards, attention and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.faults.base import DEALER, RING, left_out, one
from tests.helpers.faults.plant import Seeing, Waiting


def of_rank_0(original: Any, pack: Any, ring: Any, layout: Any, *args: Any) -> Any:
    return replace(original(pack, ring, layout, *args), real_tokens=layout.place(pack.segments, ring.size).real[0])


def of_next_rank(original: Any, pack: Any, ring: Any, *args: Any) -> Any:
    mine, its = original(pack, ring, *args), original(pack, replace(ring, rank=(ring.rank + 1) % ring.size), *args)
    return replace(its, real_tokens=mine.real_tokens, attention=mine.attention, ring=ring)


# ---- what is seen, and who meets whom ----


def later_seen(original: Any, self: Any, queries: Any, keys: Any) -> Any:
    """Let a run see those after it."""
    apart = 0 if queries == keys else len(self.queries)
    return original(self._replace(apart=self.apart + apart), queries, keys)


def none_of_later_ranks(original: Any, slices: Any, placement: Any, rank: int, *sources: int) -> Any:
    return [] if min(sources) > rank else original(slices, placement, rank, *sources)


def one_more(original: Any, segments: Any, window: Any) -> Any:
    return original(segments, window and window + 1)


# ---- what a plan makes of it ----


def first_order_alone(original: Any, self: Any, order: Any, heads: Any, *results: Any) -> None:
    """Lose what the calls of all orders of the queries but the first add."""
    if order is not next(iter(self.orders)):
        lost = [x.new_zeros(x.shape) for x in results]
        results = (lost[0], *(x.fill_(-torch.inf) for x in lost[1:]))
    original(self, order, heads, *results)


def keys_for_values(original: Any, self: Any, q: Any, k: Any, v: Any, *args: Any) -> Any:
    return original(self, q, k, v, *args) if self.transport.ring.rank else original(self, q, v, k, *args)


def other_keys(original: Any, self: Any, dout: Any, kept: Any, *args: Any) -> Any:
    q, k, *rest = kept
    return original(self, dout, (q, k.roll(1, 0), *rest), *args)


def dq_in_float32(original: Any, *args: Any) -> Any:
    dq, dk, dv = original(*args)
    return dq.float().to(dq.dtype), dk, dv


# ---- what travels ----


def other_row(x: Any) -> Any:
    """Put a row in the place of the first that another rank should get."""
    return torch.cat((x[-1:], x[1:]))


def nothing_sent(x: Any) -> Any:
    """Leave out the first row that should be sent."""
    return torch.cat((torch.zeros_like(x[:1]), x[1:]))


def sending(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda between: lambda ring, going, coming: between(ring, [(to, change(x)) for to, x in going], coming)


def elsewhere(original: Any, self: Any, rows: Any, dk: Any, *args: Any, **how: Any) -> None:
    """Add what comes from other ranks to the rows after its own."""
    original(self, rows, dk if self.own is None else dk.roll(1, 0), *args, **how)


def lost_on_the_way(original: Any, self: Any, *args: Any, **how: Any) -> None:
    if self.own is None:
        original(self, *args, **how)


def begun_anew(original: Any, self: Any, *args: Any) -> Any:
    self.sums = None
    return original(self, *args)


# ---- kernels, merges and sums ----


def unweighted(original: Any, out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
    added = out + block_out
    original(out, lse, block_out, block_lse)
    out.copy_(added)


def other_scale(original: Any, *args: Any) -> Any:
    *given, scale = args
    return original(*given, scale * 1.0001)


def dk_for_dv(original: Any, *args: Any) -> Any:
    dq, dk, _ = original(*args)
    return dq, dk, dk


def one_key_later(original: Any, *args: Any) -> Iterator[Any]:
    for piece, mask in original(*args):
        yield piece, mask if mask is None else F.pad(mask[:, :-1], (1, 0))


def no_delta(original: Any, self: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, *args: Any) -> Any:
    """Leave out the row sums of dout × out: they are 0 where out is."""
    return original(self, dout, q, k, v, torch.zeros_like(out), *args)


def as_float32(logaddexp: Any) -> Callable[..., Any]:
    return lambda one, other, out: out.copy_((logaddexp(one, other) * 2**24).round() / 2**24)


def other_heads(original: Any, self: Any, *tensors: Any) -> Any:
    ranks = self.heads.ranks
    return original(self, *(x.unflatten(0, (ranks, -1)).flip(0).flatten(0, 1) for x in tensors))


SHARD, PLAN, TRAVEL = "dealer.packing:shard_pack", "ring.plan:RingPlan.", "ring.transports.travel:Travel"
MERGE_ROWS, RING_SUM, HEADS = "ring.kernels.base:merge_plain", "ring.collectives:_RingSum.", "ring.transports.heads:"
NARROW, AROUND = "ring.slices:Slice.narrowed", ("parallel=ring4", "parallel.transport=neighbour")
RING_FAULTS = (
    one("targets shifted after sharding", SHARD,
        lambda original, *args: replace(shard := original(*args), targets_t=shard.tokens_t.roll(-1)), "data", DEALER),
    one("positions of the shard", SHARD,
        lambda original, *args: replace(shard := original(*args), positions_t=torch.arange(len(shard.tokens_t))),
        "data", DEALER),
    one("rank 0's real tokens everywhere", SHARD, of_rank_0, "data", DEALER),
    one("another rank's chunks", SHARD, of_next_rank, "log-probabilities", RING),
    one("sequences see each other", "ring.selection:Selection.lengths",
        lambda original, self: (sum(original(self)),), "log-probabilities", RING),
    one("padding is real", "ring.placement:placed",
        lambda original, *args: replace(right := original(*args), real=(right.share,) * len(right.runs)), "data", RING),
    one("not causal", "ring.kernels.base:Call.seen",
        lambda original, self, number: None if self.causal else original(self, number), "log-probabilities", RING),
    one("later keys seen", NARROW, later_seen, "log-probabilities", RING),
    one("a block forgotten", "ring.calls:meet", none_of_later_ranks, "log-probabilities", RING),
    one("a window off by one", "ring.slices:slices_of", one_more, "log-probabilities", RING, "model.window=16"),
    one("a window is not seen", "ring.layouts.ringwise:slices_of",
        lambda original, segments, _window: original(segments, None), "log-probabilities", RING, "model.window=16"),
    one("merged by the maximum", MERGE_ROWS, Seeing({"torch.logaddexp": lambda _: torch.maximum}),
        "log-probabilities", RING, "parallel=ring4"),
    one("not a number in the merge", MERGE_ROWS,
        Seeing({"torch.sigmoid": lambda _: lambda apart: apart.abs().neg().log()}), "log-probabilities", RING),
    one("merged without weights", MERGE_ROWS, unweighted, "log-probabilities", RING),
    one("the late queries' blocks are not merged in", "ring.plan:_Running.add", first_order_alone,
        "log-probabilities", RING),
    one("keys of the wrong rank", PLAN + "forward", keys_for_values, "log-probabilities", RING),
    one("a row that another rank should get", TRAVEL + "._start", Seeing({"between": sending(other_row)}),
        "log-probabilities", RING),
    one("a row that nobody sent", TRAVEL + "._start", Seeing({"between": sending(nothing_sent)}),
        "log-probabilities", RING),
    one("a row that nobody sent around", TRAVEL + "._start", Seeing({"between": sending(nothing_sent)}),
        "log-probabilities", RING, *AROUND),
    one("other keys in the backward", PLAN + "backward", other_keys, "gradient", RING),
    one("dk added at the wrong place", "ring.transports.base:Home.keep", elsewhere, "gradient", RING),
    one("dk and dv do not come home", "ring.transports.base:Home.keep", lost_on_the_way, "gradient", RING),
    one("a sum begins anew on its way", TRAVEL + "Home._message", begun_anew, "gradient", RING, *AROUND),
    one("the merge rounds like float32", MERGE_ROWS, Seeing({"torch.logaddexp": as_float32}), "log-probabilities",
        RING, "parallel=ring4"),
    one("dq in float32", PLAN + "backward", dq_in_float32, "gradient", RING),
    one("the kernel's scale", "ring.kernels.cpu_flash:CpuFlash.forward", other_scale, "log-probabilities", RING),
    one("dk for dv", "ring.kernels.cpu_flash:CpuFlash.backward", dk_for_dv, "gradient", RING),
    one("the plain kernel's mask", "ring.kernels.plain:_pieces", one_key_later, "log-probabilities", RING,
        "parallel.kernel=plain"),
    one("the plain kernel's backward", "ring.kernels.plain:Plain.backward", no_delta, "gradient", RING,
        "parallel.kernel=plain"),
    one("the ring's sum in its backward too", RING_SUM + "backward",
        lambda original, ctx, *grads: original(ctx, *(2 * grad for grad in grads)), "gradient", RING),
    one("the ring is not summed", RING_SUM + "forward", Seeing({"dist.all_reduce": left_out}), "log-probabilities",
        RING),
    one("summed over the replicas too", RING_SUM + "forward",
        Seeing({"dist.all_reduce": lambda all_reduce: lambda total, **_group: all_reduce(total)}),
        "log-probabilities", RING),
    one("gathered keys in another order", "ring.transports.gather:Gather.keys",
        Seeing({"gather": lambda gather: lambda buffer, ring: gather(buffer.roll(1, 0), ring)}), "log-probabilities",
        RING, "parallel.layout=allgather"),
    one("gradients of gathered keys", "ring.transports.gather:ScatteredHome.add",
        Seeing({"sum_and_scatter": lambda summing: lambda buffer, ring: Waiting(
            summing(buffer, ring), lambda arrived: [0.5 * x for x in arrived])}),
        "gradient", RING, "parallel.layout=allgather"),
    one("heads in another order", HEADS + "SharedHeads._to_tokens", other_heads, "log-probabilities",
        RING, "parallel.layout=ulysses"),
    one("a head of keys that went to two", HEADS + "SharedHeads._sum",
        lambda _original, self, grad: grad.unflatten(1, (-1, self.heads.copies))[:, :, 0], "gradient", RING,
        "parallel=ring4", "parallel.layout=ulysses"),
    one("a row that the outer ring's neighbour should get", TRAVEL + "._start", Seeing({"between": sending(other_row)}),
        "log-probabilities", RING, "parallel=ring4", "parallel.layout=hybrid", "parallel.ulysses_size=2"),
)  # fmt: skip
