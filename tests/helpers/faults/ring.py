"""Defects of shards, attention and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from rlexp.training.ring.base import ALL, EARLY, LATE
from rlexp.training.ring.collectives import rotate
from tests.helpers.faults.base import (
    RING,
    left_out,
    nothing,
    one,
)
from tests.helpers.faults.plant import Change, Given, Seeing, Waiting


def of_rank_0(original: Any, pack: Any, ring: Any, layout: Any, *args: Any) -> Any:
    return replace(original(pack, ring, layout, *args), real_tokens=layout.deal(pack.segments, ring.size).real[0])


def of_next_rank(original: Any, pack: Any, ring: Any, *args: Any) -> Any:
    mine, its = original(pack, ring, *args), original(pack, replace(ring, rank=(ring.rank + 1) % ring.size), *args)
    return replace(its, real_tokens=mine.real_tokens, attention=mine.attention)


def real_padding(original: Any, segments: Any, owners: Any) -> Any:
    found = original([replace(segment, length=segment.padded) for segment in segments], owners)
    return replace(found, segments=tuple(segments))


def other_block(change: Callable[[Any], Any]) -> Change:
    """Change the block that a layout gives a pair of ranks, if it gives one."""

    def block(original: Any, *args: Any) -> Any:
        right = original(*args)
        return right if right is None else change(right)

    return block


def unweighted(original: Any, out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
    added = out + block_out
    original(out, lse, block_out, block_lse)
    out.copy_(added)


def counted_backwards(original: Any, self: Any, *args: Any) -> Any:
    size, rank = self.ring.size, self.ring.rank
    return original(
        replace(self, blocks=tuple(self.blocks[(2 * rank - source) % size] for source in range(size))), *args
    )


def keys_for_values(original: Any, self: Any, q: Any, k: Any, v: Any, *args: Any) -> Any:
    return original(self, q, k, v, *args) if self.ring.rank else original(self, q, v, k, *args)


def stuck(moving: Any) -> Callable[..., Waiting]:
    """Transfer a buffer, but hand over the one that was sent."""
    return lambda buffer, ring: Waiting(moving(buffer, ring), lambda _arrived: buffer)


def keys_stuck(moving: Any, _self: Any, _dout: Any, kept: Any, *_args: Any) -> Callable[..., Any]:
    """Keep the keys and values where they are, while their gradients move on."""
    return lambda buffer, ring: stuck(moving)(buffer, ring) if buffer is kept[1] else moving(buffer, ring)


def one_hop_off(original: Any, self: Any, *args: Any) -> Any:
    dq, *dkv = original(self, *args)
    dk, dv = rotate(torch.stack(dkv), self.ring).wait()
    return dq, dk, dv


def dq_in_float32(original: Any, *args: Any) -> Any:
    dq, dk, dv = original(*args)
    return dq.float().to(dq.dtype), dk, dv


def other_scale(original: Any, *args: Any) -> Any:
    *tensors, call = args
    return original(*tensors, replace(call, scale=call.scale * 1.0001))


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


def turned(original: Any, buffer: Any, ring: Any) -> Any:
    return original(buffer, replace(ring, rank=ring.size - 1 - ring.rank, ranks=ring.ranks[::-1]))


def none_between(original: Any, cut: Any, rank: int) -> Any:
    """Give a rank's later chunk the keys before its earlier chunk, and none of those between the two."""
    index, lengths = original(cut, rank)
    first = [chunks[0] for chunks in cut.chunks[rank] for _ in chunks]  # by chunk
    kept = [keys[: chunk.start] for keys, chunk in zip(index.split(list(lengths)), first, strict=True)]
    return torch.cat(kept), tuple(map(len, kept))


def last_lost(summing: Any, _self: Any, _dout: Any, kept: Any, *_args: Any) -> Callable[..., Waiting]:
    """Lose the gradients of the last head of gathered keys."""
    heads = len(kept[1])
    sums = 0

    def counted(buffer: Any, ring: Any) -> Waiting:
        nonlocal sums
        sums += 1
        keep = sums < heads
        return Waiting(summing(buffer, ring), lambda arrived: arrived * keep)

    return counted


def other_heads(original: Any, self: Any, *tensors: Any) -> Any:
    ranks = self.heads.ranks
    return original(self, *(x.unflatten(0, (ranks, -1)).flip(0).flatten(0, 1) for x in tensors))


def other_neighbour(original: Any, rank: int, ring_size: int, size: int) -> Any:
    return original(rank, ring_size, size)[0], original((rank + 1) % size, ring_size, size)[1]


SHARD, ZIGZAG, ROTATING = "ring.layouts.shard:shard_pack", "ring.layouts.zigzag:", "ring.rotation:RotatingPlan."
MERGE_ROWS, RING_SUM = "ring.kernels.base:merge_plain", "ring.collectives:_RingSum."
RING_FAULTS = (
    one("targets shifted after sharding", SHARD,
        lambda original, *args: replace(shard := original(*args), targets_t=shard.tokens_t.roll(-1)), "data", RING),
    one("positions of the shard", SHARD,
        lambda original, *args: replace(shard := original(*args), positions_t=torch.arange(len(shard.tokens_t))),
        "data", RING),
    one("rank 0's real tokens everywhere", SHARD, of_rank_0, "data", RING),
    one("another rank's chunks", SHARD, of_next_rank, "log-probabilities", RING),
    one("sequences see each other", "ring.selection:selection",
        lambda original, ranges: replace(right := original(ranges), lengths=(sum(right.lengths),)),
        "log-probabilities", RING),
    one("padding is real", "ring.cut:cut", real_padding, "data", RING),
    one("not causal", ZIGZAG + "Zigzag.block", other_block(lambda block: replace(block, causal=False)),
        "log-probabilities", RING),
    one("later keys seen", ZIGZAG + "Zigzag.block",
        other_block(lambda block: replace(block, keys=ALL) if block.keys is EARLY else block),
        "log-probabilities", RING),
    one("early queries see later keys", ZIGZAG + "Zigzag.block",
        other_block(lambda block: replace(block, queries=ALL) if block.queries is LATE else block),
        "log-probabilities", RING),
    one("a block forgotten", ZIGZAG + "Zigzag.block",
        other_block(lambda block: None if block.queries is LATE else block), "log-probabilities", RING),
    one("contiguous chunks, zigzag blocks", ZIGZAG + "zigzag",
        Seeing({"cut": lambda cut: lambda segments, owners: cut(segments, sorted(owners))}), "log-probabilities",
        RING),
    one("merged by the maximum", MERGE_ROWS, Seeing({"torch.logaddexp": lambda _: torch.maximum}),
        "log-probabilities", RING, "parallel=ring4"),
    one("not a number in the merge", MERGE_ROWS,
        Seeing({"torch.sigmoid": lambda _: lambda apart: apart.abs().neg().log()}), "log-probabilities", RING),
    one("merged without weights", MERGE_ROWS, unweighted, "log-probabilities", RING),
    one("the late queries' blocks are not merged in", "ring.rotation:merge", nothing, "log-probabilities", RING),
    one("keys of the wrong rank", ROTATING + "forward", keys_for_values, "log-probabilities", RING),
    one("keys do not move on", ROTATING + "forward", Seeing({"rotate": stuck}), "log-probabilities", RING),
    one("source counted the other way", ROTATING + "forward", counted_backwards, "log-probabilities", RING,
        "parallel=ring4"),
    one("keys do not move on in the backward", ROTATING + "backward", Seeing({"rotate": Given(keys_stuck)}),
        "gradient", RING),
    one("dk and dv do not come home", ROTATING + "backward", one_hop_off, "gradient", RING),
    one("dq without the late queries' blocks", ROTATING + "_summed",
        lambda original, self, q, dqs: original(self, q, {ALL: dqs[ALL]}), "gradient", RING),
    one("the merge rounds like float32", MERGE_ROWS, Seeing({"torch.logaddexp": as_float32}), "log-probabilities",
        RING, "parallel=ring4"),
    one("dq in float32", ROTATING + "backward", dq_in_float32, "gradient", RING),
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
    one("the ring turns the other way", "ring.collectives:rotate", turned, "log-probabilities", RING,
        "parallel=ring4"),
    one("keys between a rank's chunks", "ring.layouts.allgather:keys_before", none_between, "log-probabilities", RING,
        "parallel.layout=allgather"),
    one("gradients of gathered keys", "ring.layouts.allgather:GatheringPlan.backward",
        Seeing({"sum_and_scatter": Given(last_lost)}), "gradient", RING, "parallel.layout=allgather"),
    one("heads in another order", "ring.layouts.ulysses:SharedHeads._to_tokens", other_heads, "log-probabilities",
        RING, "parallel.layout=ulysses"),
    one("a head of keys that went to two", "ring.layouts.ulysses:SharedHeads._sum",
        lambda _original, self, grad: grad.unflatten(1, (-1, self.heads.copies))[:, :, 0], "gradient", RING,
        "parallel=ring4", "parallel.layout=ulysses"),
    one("the outer ring's neighbour", "ring.groups:split", other_neighbour, "log-probabilities", RING,
        "parallel=ring4", "parallel.layout=hybrid", "parallel.ulysses_size=2"),
)  # fmt: skip
