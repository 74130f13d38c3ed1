"""The defects that tests plant into the product, with the stage and room that `verify` must name.

A defect names a function of the product (`target`) and what takes its place (`change`): a function that is called with
the original and with the arguments of each call, or `Seeing`, under which the original finds other things behind names
that it uses. It follows the product through new local names, new lines and new comments. If the target goes, or is no
longer called, the defect's test fails and says so.

`python -m tests.helpers.planted` plants every defect, each into ranks of its own, and prints what `verify` found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rlexp.config.schema import OptimName
from rlexp.launch.place import Place
from rlexp.training.algos.base import PairLogps, PairLosses
from rlexp.training.dataset.tokens import Example
from rlexp.training.metrics.meter import REPLICATED, SHARDED
from rlexp.training.model.policy import cast_parameters
from rlexp.training.ring.collectives import _all_gather as all_gather
from rlexp.training.ring.collectives import rotate
from rlexp.training.ring.groups import ALONE, World
from rlexp.training.ring.layout import ALL, EARLY, LATE
from rlexp.training.types import TokenLogps
from tests.helpers.paths import FILES
from tests.helpers.planting import Altered, Change, Given, Seeing, Waiting, plant

# Two replicas of a ring of 2, four micro-batches of two pairs a step; clipping, decay and warm-up at work.
BASE = ("launch.device=cpu", "logger=none", "seed=3", "parallel=ring2", "launch.nproc=4", "train.batch_size=8",
        "train.micro_batch_size=2", "data.size=20", "data.eval_size=0", "optim.lr=1e-3", "optim.weight_decay=0.1",
        "optim.max_grad_norm=0.5", "optim.warmup_steps=1")  # fmt: skip
FP64 = (*BASE, "train.precision=fp64")
# A mixture of messages and of dialogues as texts; most have several turns. An epoch is one step.
ROWS = FILES / "rows"
MIXED = (*(word for word in FP64 if not word.startswith(("data.", "train.batch_size="))), "data=hf",
         f"data.sources.messages={{path: {ROWS}/messages.jsonl, weight: 2}}",
         f"data.sources.dialogues={{path: {ROWS}/dialogues.jsonl, weight: 1.5, system: Speak.}}", "data.eval_size=5",
         "train.batch_size=16", "train.epochs=2")  # fmt: skip

DATA, RING, MODEL, ALGOS = (f"rlexp/training/{name}/" for name in ("dataset", "ring", "model", "algos"))
TRAIN, ENGINE, METRICS = (f"rlexp/training/{name}/" for name in ("train", "engine", "metrics"))


@dataclass(frozen=True)
class Fault:
    name: str
    target: str  # below rlexp.training, or in verify or transformers
    change: Change | Seeing
    stage: str
    room: str
    overrides: tuple[str, ...] = FP64
    step: int | None = None  # at which it must first be seen

    def plant(self, mark: Callable[[], None]) -> Callable[[], None]:
        """Plant it into this process and return what undoes it; `mark` is called when it is at work."""
        where = {"transformers": "", "verify": "rlexp."}.get(self.target.partition(".")[0], "rlexp.training.")
        return plant(where + self.target, self.change, mark)


def faulty_rank(place: Place, name: str, reached: Path, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run a rank of the product with a defect. The file `reached` appears when the defect is at work."""
    ALL_FAULTS[name].plant(reached.touch)
    return target(place, *args)


def one(name: str, target: str, change: Change | Seeing, stage: str, room: str, *more: str,
        base: tuple[str, ...] = FP64, step: int | None = None) -> Fault:  # fmt: skip
    return Fault(name, target, change, stage, room, (*base, *more), step)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for a call that is left out."""


def left_out(_function: Any) -> Callable[..., None]:
    return nothing


SHORT_BATCH = ("data.size=13", "data.drop_last=false")  # 8 and 5 pairs
EMPTY_REPLICA = ("data.size=9", "data.drop_last=false")  # 8 and 1
CUT = ("data.max_length=100", "data.too_long=truncate")
CUT_ANSWERS = ("data.max_length=40", "data.too_long=truncate")


# ---- data ----


def answers_from(cut: Callable[[Any, int], Any]) -> Change:
    """Cut the answers of a truncated pair by `cut(answer, tokens that are kept)`."""

    def change(original: Any, whole: Example, *args: Any) -> Example:
        kept: Example = original(whole, *args)
        answers = zip(whole.answers, kept.answers, strict=True)
        return replace(kept, answers=tuple(cut(answer, len(short)) for answer, short in answers))

    return change


def swapped(example: Example) -> Example:
    return replace(example, answers=example.answers[::-1])


def longer(original: Any, self: Any, rows: Any) -> Any:
    return original(replace(self, max_length=self.max_length + 40), rows)


def share_of(self: Any, dp_size: int) -> int:
    """Return how many pairs a replica takes; the last replica may take fewer."""
    return -(-len(self.indices) // dp_size)


def overlapping(original: Any, self: Any, replica: int, dp_size: int, micro_batch_size: int) -> Any:
    mine = self.indices[replica : replica + share_of(self, dp_size)]
    return original(replace(self, indices=mine), 0, 1, micro_batch_size)


def lost_tail(original: Any, self: Any, replica: int, dp_size: int, micro_batch_size: int) -> Any:
    even = len(self.indices) // dp_size * dp_size
    return original(replace(self, indices=self.indices[:even]), replica, dp_size, micro_batch_size)


def lost_micro_batch(original: Any, self: Any, replica: int, dp_size: int, micro_batch_size: int) -> Any:
    whole = share_of(self, dp_size) // micro_batch_size
    return original(self, replica, dp_size, micro_batch_size)[:whole]


def repacked(rewrite: Callable[[Any, Any, slice], None]) -> Change:
    """Rewrite the tensors of a pack at the real tokens of each sequence: `rewrite(pack, sequence, place)`."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        pack = original(*args, **kwargs)
        for number, segment in enumerate(pack.segments[: pack.sequences]):
            rewrite(pack, number, slice(segment.start, segment.start + segment.length))
        return pack

    return change


def unshifted(pack: Any, _sequence: Any, at: slice) -> None:
    pack.targets_T[at.start : at.stop - 1] = pack.tokens_T[at.start : at.stop - 1]


def shifted_twice(pack: Any, _sequence: Any, at: slice) -> None:
    pack.targets_T[at.start : at.stop - 2] = pack.tokens_T[at.start + 2 : at.stop]
    pack.targets_T[at.stop - 2] = pack.targets_T[at.stop - 1]


def with_prompt(pack: Any, sequence: Any, at: slice) -> None:
    pack.sequence_T[at.start : at.stop - 1] = sequence


def without_first(pack: Any, sequence: Any, at: slice) -> None:
    pack.sequence_T[(pack.sequence_T == sequence).nonzero()[0]] = -1


def with_end(pack: Any, sequence: Any, at: slice) -> None:
    pack.sequence_T[at.stop - 1] = sequence


def not_restarted(pack: Any, _sequence: Any, at: slice) -> None:
    pack.positions_T[at] = torch.arange(at.start, at.stop)


def off_by_one(pack: Any, _sequence: Any, at: slice) -> None:
    pack.positions_T[at] += 1


def padding_as_tokens(original: Any, *args: Any, **kwargs: Any) -> Any:
    pack = original(*args, **kwargs)
    return replace(pack, segments=tuple(replace(segment, length=segment.padded) for segment in pack.segments))


def all_trained(original: Any, answer: Any) -> Iterator[tuple[str, bool]]:
    return ((text, True) for text, _ in original(answer))


def to_the_first_answer(_original: Any, one: Any, _other: Any) -> int:
    return next(place for place, message in enumerate(one) if message["role"] == "assistant")


def first_half_twice(original: Any, *args: Any, **kwargs: Any) -> Any:
    order = original(*args, **kwargs)
    half = len(order) // 2
    order[half : 2 * half] = order[:half]
    return order


TOKENS, SAMPLER, PACKING = "dataset.tokens:", "dataset.sampler:", "dataset.packing:"
MESSAGES, MIXTURE, VIEWS = "dataset.messages:", "dataset.mixture:Mixture.", "dataset.views:"
DATA_FAULTS = (
    one("no end of sequence", TOKENS + "RowTokenizer._ended", lambda _, _self, tokens: tokens, "data", DATA),
    one("truncated at the wrong side", TOKENS + "cut_from_start",
        lambda _original, prompt, longest, *_bos: prompt[:longest], "data", DATA, *CUT),
    one("answers cut at their beginning", TOKENS + "truncated",
        answers_from(lambda answer, kept: answer[len(answer) - kept :]), "data", DATA, *CUT_ANSWERS),
    one("one token too many is kept", TOKENS + "truncated", answers_from(lambda answer, kept: answer[: kept + 1]),
        "data", DATA, *CUT_ANSWERS),
    one("chosen and rejected swapped", TOKENS + "RowTokenizer._example",
        lambda original, *args: swapped(original(*args)), "data", DATA),
    one("too long is not dropped", TOKENS + "Encoder.encode", longer, "data", DATA, "data.max_length=140",
        "data.too_long=drop"),
    one("another permutation", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, seed=epoch), self.seed), "data", DATA),
    one("every epoch the same", SAMPLER + "Sampler._order", lambda original, self, _epoch: original(self, 0),
        "data", DATA, "data.size=11", "train.epochs=2", step=2),
    one("the seed is ignored", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, seed=0), epoch), "data", DATA),
    one("not shuffled", SAMPLER + "Sampler._order",
        lambda original, self, epoch: original(replace(self, shuffle=not self.shuffle), epoch), "data", DATA),
    one("replicas overlap", SAMPLER + "Batch.micro_batches", overlapping, "data", DATA),
    one("every replica has the same", SAMPLER + "Batch.micro_batches",
        lambda original, self, _replica, *sizes: original(self, 0, *sizes), "data", DATA),
    one("the tail of a replica is lost", SAMPLER + "Batch.micro_batches", lost_tail, "data", DATA, *SHORT_BATCH,
        step=2),
    one("the tail of a micro-batch is lost", SAMPLER + "Batch.micro_batches", lost_micro_batch, "data", DATA,
        *SHORT_BATCH, step=2),
    one("the short batch is dropped", SAMPLER + "Sampler.steps_per_epoch",
        lambda _original, self: self.size // self.batch_size, "data", DATA, *SHORT_BATCH),
    one("the run is longer", SAMPLER + "total_steps",
        lambda original, steps_per_epoch, most, epochs: original(steps_per_epoch, most, epochs or 2), "data", DATA),
    one("targets not shifted", PACKING + "pack_sequences", repacked(unshifted), "data", DATA),
    one("targets shifted twice", PACKING + "pack_sequences", repacked(shifted_twice), "data", DATA),
    one("prompts are trained on", PACKING + "pack_sequences", repacked(with_prompt), "data", DATA),
    one("the first token of an answer is not", PACKING + "pack_sequences", repacked(without_first), "data", DATA),
    one("the end predicts too", PACKING + "pack_sequences", repacked(with_end), "data", DATA),
    one("positions do not restart", PACKING + "pack_sequences", repacked(not_restarted), "data", DATA),
    one("positions off by one", PACKING + "pack_sequences", repacked(off_by_one), "data", DATA),
    one("padding counts as tokens", PACKING + "pack_sequences", padding_as_tokens, "data", DATA),
    one("sequences in another order", PACKING + "pack_pairs",
        lambda original, pairs, *args, **kwargs: original(list(map(swapped, pairs)), *args, **kwargs), "data", DATA),
    one("a pack ignores masks", PACKING + "pack_sequences",
        lambda original, *args, **kwargs: original(*args, **kwargs | {"masks": ()}), "data", DATA, base=MIXED),
    one("the user's turns are trained on", MESSAGES + "turns", all_trained, "data", DATA, base=MIXED),
    one("another shared beginning", MESSAGES + "shared_beginning", to_the_first_answer, "data", DATA, base=MIXED),
    one("no system prompt", MESSAGES + "with_system", lambda _, prompt, _system: prompt, "data", DATA, base=MIXED),
    one("weights are ignored", MIXTURE + "counts", lambda _, self: self.sizes, "data", DATA, base=MIXED),
    one("samples twice in an epoch", MIXTURE + "order", first_half_twice, "data", DATA, base=MIXED),
    one("every epoch begins a source anew", MIXTURE + "_of_source",
        lambda original, self, source, count, seed, _epoch, **how: original(self, source, count, seed, 0, **how),
        "data", DATA, base=MIXED, step=2),
    one("held-out rows are trained on", VIEWS + "Places.__getitem__",
        lambda original, self, index: original(self, index) if self.held_out else index, "data", DATA, base=MIXED),
    one("other rows are held out", VIEWS + "drawn", lambda _, _total, size: np.arange(size), "data", DATA, base=MIXED),
)  # fmt: skip


# ---- the ring ----


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


SHARD, ZIGZAG, ROTATING = "ring.shard:shard_pack", "ring.layouts.zigzag:", "ring.rotation:RotatingPlan."
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


# ---- the model ----


def rounded_logits(original: Any, *args: Any) -> Any:
    logits_nV = original(*args)
    return (logits_nV * 2**26).round() / 2**26


def scaled_mean(original: Any, *args: Any) -> Any:
    said = original(*args)
    return said._replace(mean_logits_t=said.mean_logits_t * 1.001)


def half_the_gradient(original: Any, *args: Any) -> Any:
    for at, logits_grad_nV in original(*args):
        yield at, logits_grad_nV * 0.5


def own_scale(original: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    return original(module, query, *args, **kwargs | {"scaling": query.shape[-1] ** -0.5 * 1.01})


HEAD = "model.head:"
MODEL_FAULTS = (
    one("positions are not handed over", "model.policy:hidden_states",
        lambda original, trunk, shard: original(lambda **asked: trunk(**asked | {"position_ids": None}), shard),
        "log-probabilities", MODEL),
    one("positions off by one in the model", "model.policy:hidden_states",
        lambda original, trunk, shard: original(trunk, replace(shard, positions_t=shard.positions_t * 2)),
        "log-probabilities", MODEL),
    one("float32 in the softmax", HEAD + "logits_of", rounded_logits, "log-probabilities", MODEL),
    one("log-probability of the token itself", HEAD + "HeadLogps.forward",
        lambda original, *args: original(*args[:-1], replace(args[-1], targets_t=args[-1].tokens_t)),
        "log-probabilities", MODEL),
    one("the head does not hand its gradient down", HEAD + "_logits_grads", half_the_gradient, "gradient", MODEL),
    one("mean logits", HEAD + "HeadLogps.forward", scaled_mean, "metrics", MODEL),
    one("nothing is frozen", "model.policy:Policy.freeze", nothing, "gradient", MODEL, "model.freeze=[*layers.0.*]"),
    one("the model's own scale", "model.hook:attention", own_scale, "log-probabilities", MODEL),
    one("random weights by another seed", "model.loading:load_model",
        lambda original, cfg, *args, **kwargs: original(replace(cfg, seed=cfg.seed + 1), *args, **kwargs),
        "log-probabilities", MODEL),
    one("the log-probabilities of the padding", HEAD + "HeadLogps.forward",
        lambda original, *args: TokenLogps(*(value if value is None else value * 0.999 for value in original(*args))),
        "log-probabilities", MODEL),
)  # fmt: skip


# ---- losses ----


def other_losses(losses: Callable[..., Any]) -> Change:
    """Take the losses from `losses(original, self, policy, reference)`, and leave the values per pair right."""

    def change(original: Any, self: Any, policy: PairLogps, reference: PairLogps) -> PairLosses:
        return replace(original(self, policy, reference), losses_P=losses(original, self, policy, reference))

    return change


def wrong_sign(original: Any, self: Any, *logps: PairLogps) -> Any:
    """Return (1 − s) × the losses of the labels − s × those of the swapped labels."""
    right, other = (original(replace(self, label_smoothing=label), *logps).losses_P for label in (0.0, 1.0))
    return (1 - self.label_smoothing) * right - self.label_smoothing * other


def added(logps: PairLogps) -> PairLogps:
    return replace(logps, rejected_P=-logps.rejected_P)


def no_chosen(logps: PairLogps) -> PairLogps:
    return replace(logps, chosen_P=torch.zeros_like(logps.chosen_P))


DPO, REWARDS = "algos.dpo:DPO.__call__", "algos.implicit_rewards:"
ALGOS_FAULTS = (
    one("beta is forgotten", DPO,
        other_losses(lambda original, self, *logps: original(replace(self, beta=1.0), *logps).losses_P),
        "loss", ALGOS, step=1),
    one("label smoothing with the wrong sign", DPO, other_losses(wrong_sign), "loss", ALGOS,
        "loss.label_smoothing=0.1", step=1),
    one("label smoothing on the right label", DPO,
        other_losses(lambda original, self, *logps: original(replace(self, label_smoothing=0.0), *logps).losses_P),
        "loss", ALGOS, "loss.label_smoothing=0.1", step=1),
    one("the rejected answer is added", DPO,
        other_losses(lambda original, self, *logps: original(self, *map(added, logps)).losses_P), "loss", ALGOS),
    one("no reference in the margin", DPO,
        other_losses(lambda original, self, policy, start: original(self, policy, no_chosen(start)).losses_P),
        "loss", ALGOS),
    one("rewards without beta", REWARDS + "implicit_rewards",
        lambda original, policy, start, beta: original(policy, start, beta)
        | {"rewards/chosen": policy.chosen_P.detach() - start.chosen_P.detach()}, "metrics", ALGOS),
    one("a tie counts as lost", REWARDS + "accuracies",
        lambda original, *args: torch.where((right := original(*args)) == 0.5, 0.0, right), "metrics", ALGOS),
    one("the margin of the logged rewards", REWARDS + "implicit_rewards",
        lambda original, *args: (right := original(*args))
        | {"rewards/margins": right["rewards/chosen"] + right["rewards/rejected"]}, "metrics", ALGOS),
)  # fmt: skip


# ---- the training step ----


def scaled(factor: Callable[[Any, int], float]) -> Change:
    """Multiply the loss of a micro-batch by a function of the step and its number of pairs."""

    def change(original: Any, self: Any, held: Any, meter: Any) -> Any:
        return original(self, held, meter) * factor(self, held.shard.sequences // 2)

    return change


def whole_batch(step: Any, _pairs: int) -> float:
    return len(step.batch.indices) / float(step.task.run.cfg.train.batch_size)


def every_one_last(original: Any, task: Any, number: int) -> Any:
    def ending(backward: Any) -> Callable[..., None]:
        return lambda loss, **_last: backward(loss, last=True)

    return original(with_run(task, engine=Altered(task.run.engine, backward=ending)), number)


def with_run(task: Any, **changes: Any) -> Any:
    """Copy the task, with another run."""
    other = copy.copy(task)
    other.run = replace(task.run, **changes)
    return other


def one_too_few(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self.micro_batches = self.micro_batches[:-1]


def of_replica_0(original: Any, self: Any, batch: Any) -> Any:
    world = self.run.world
    return original(with_run(self, world=replace(world, rank=world.ring.rank)), batch)


def one_for_none(original: Any, *args: Any) -> Any:
    losses_P = original(*args)
    return losses_P if len(losses_P) else losses_P.new_ones(1) + losses_P.sum()


def in_float32(original: Any, values_t: Any, shard: Any) -> Any:
    return original(values_t.float(), shard).float().double()


def own_reference(original: Any, self: Any, shard: Any, meter: Any) -> Any:
    kept: list[TokenLogps] = []

    def keeping(forward: Any) -> Callable[..., TokenLogps]:
        return lambda shard: kept.append(forward(shard)) or kept[-1]

    task = with_run(self, engine=Altered(self.run.engine, forward=keeping))
    task.reference = lambda _shard: TokenLogps(*(None if value is None else value.detach() for value in kept[-1]))
    return original(task, shard, meter)


def learning(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the trained policy, which is built first, for the reference too."""
    policies: list[Any] = []

    def kept(build_policy: Any) -> Callable[..., Any]:
        return lambda *args: policies.append(build_policy(*args)) or policies[-1]

    def trained(_build_reference: Any) -> Callable[..., Any]:
        return lambda *_args: torch.no_grad()(lambda shard: policies[0](shard))

    names = Seeing({"build_policy": kept, "build_reference": trained})
    return names.of(original, nothing)(*args, **kwargs)


def starting_in_bfloat16(original: Any, cfg: Any, starting: Any, *args: Any) -> Any:
    cast_parameters(starting, torch.bfloat16)
    return original(cfg, starting, *args)


def too_early(original: Any, self: Any, step: int) -> float:
    steps = self.warmup_steps
    return original(self, step) * ((steps + 1) / steps if step <= steps else 1.0)


def next_rate(original: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    schedule = Altered(run.schedule, at=lambda at: lambda step: at(step + 1))
    return original(replace(run, schedule=schedule), *args, **kwargs)


def per_pair(original: Any, meter: Any, tokens: Any, shard: Any) -> None:
    def adding(add: Any) -> Callable[..., None]:
        pairs = shard.sequences // 2
        return lambda name, total, count, spread: add(name, total, pairs if "chosen" in name else count, spread)

    original(Altered(meter, add_mean=adding), tokens, shard)


def of_one_rank(original: Any, task: Any, step: Any, meter: Any, *args: Any) -> Any:
    """Log the loss of this rank's own sums."""
    own = copy.copy(meter)
    own.world = World(0, 1, ALONE)
    reducing = {"reduce": lambda reduce: lambda: reduce() | {"loss": own.reduce().get("loss", 0.0)}}
    return original(task, step, Altered(meter, **reducing), *args)


def forgetting(original: Any, task: Any, sinks: Any, position: Any = None, after_step: Any = None) -> Any:
    from rlexp.training.train.loop import Position

    position = position or Position()

    def anew(take: Any) -> Callable[..., Any]:
        return lambda *args: (setattr(position, "total_tokens", 0), take(*args))[1]

    return Seeing({"train_step": anew}).of(original, nothing)(task, sinks, position, after_step)


def last_pairs(Batch: Any, self: Any, _step: int) -> Callable[..., Any]:
    total, size = len(self.eval_pairs), self.run.cfg.train.batch_size
    return lambda step, epoch, _indices: Batch(step, epoch, tuple(range(max(0, total - size), total)))


STEP, PAIRS, SCHEDULE = "train.step:", "train.pair_task:", "train.schedule:Schedule.at"
TRAIN_FAULTS = (
    one("the world is not in the scale", PAIRS + "PairStep.loss",
        scaled(lambda step, _: 1 / step.task.run.world.size), "loss", TRAIN),
    one("divided by the accumulation again", PAIRS + "PairStep.loss",
        scaled(lambda step, _: 1 / len(step.micro_batches)), "loss", TRAIN),
    one("mean of means", PAIRS + "PairStep.loss", scaled(lambda _, pairs: 1 / pairs), "loss", TRAIN),
    one("divided by the whole batch", PAIRS + "PairStep.loss", scaled(whole_batch), "loss", TRAIN, *SHORT_BATCH,
        step=2),
    one("every micro-batch is the last", STEP + "train_step", every_one_last, "loss", TRAIN),
    one("the last micro-batch is left out", PAIRS + "PairStep.__init__", one_too_few, "data", TRAIN),
    one("a replica takes the other's pairs", PAIRS + "PairTask.micro_batches", of_replica_0, "data", TRAIN),
    one("an empty replica adds", PAIRS + "PairTask.losses", one_for_none, "loss", TRAIN, *EMPTY_REPLICA, step=2),
    one("sums in float32", "train.sequence_sums:sum_by_sequence", in_float32, "log-probabilities", TRAIN),
    one("the sides of a pair swapped", PAIRS + "by_pair",
        lambda original, values_S: PairLogps((right := original(values_S)).rejected_P, right.chosen_P),
        "log-probabilities", TRAIN),
    one("the policy is its own reference", PAIRS + "PairTask.losses", own_reference, "log-probabilities", TRAIN),
    one("the reference learns", "train.build:build", learning, "log-probabilities", TRAIN, step=2),
    one("the reference in float32", "train.build:build_reference", starting_in_bfloat16, "log-probabilities", TRAIN),
    one("warm-up off by one", SCHEDULE, too_early, "optimizer", TRAIN),
    one("decay off by one", SCHEDULE, lambda original, self, step: original(self, step + 1), "optimizer", TRAIN,
        "optim.warmup_steps=0"),
    one("the next step's rate", STEP + "optimize", next_rate, "optimizer", TRAIN),
    one("tokens of one rank of the ring", STEP + "note_tokens", Seeing({"SHARDED": lambda _: REPLICATED}), "metrics",
        TRAIN),
    one("logits per pair", PAIRS + "note_logits", per_pair, "metrics", TRAIN),
    one("loss of rank 0", STEP + "row_of", of_one_rank, "metrics", TRAIN),
    one("epochs as whole numbers", STEP + "row_of",
        lambda original, task, step, *args: original(task, step, *args) | {"train/epoch": float(step.batch.epoch)},
        "metrics", TRAIN),
    one("total tokens start anew", "train.loop:train_loop", forgetting, "metrics", TRAIN, step=2),
    one("held-out pairs twice", PAIRS + "PairTask.evaluate", Seeing({"Batch": Given(last_pairs)}), "metrics", TRAIN,
        "data.eval_size=13", "train.eval_every=1"),
)  # fmt: skip


# ---- engines ----


def summed(original: Any, self: Any) -> None:
    bucket = self._sent[0].bucket
    original(self)
    for master in bucket:
        master.grad *= self.world.size


def in_the_ring(all_reduce: Any, self: Any) -> Callable[..., Any]:
    return lambda flat, **options: all_reduce(flat, group=self.world.ring.group, **options)


def not_zeroed(original: Any, self: Any) -> None:
    kept = {name: master.grad for name, master in self.masters.items()}
    original(self)
    for name, master in self.masters.items():
        master.grad = kept[name]


def emptied_first(original: Any, self: Any, loss: Any, *, last: bool) -> None:
    self.optimizer.zero_grad()
    original(self, loss, last=last)


def all_but_one(original: Any, self: Any) -> None:
    first = self._sent[0].bucket[0]
    own = first.grad.clone()
    original(self)
    first.grad.copy_(own)


def measured_first(original: Any, self: Any, loss: Any, *, last: bool) -> None:
    """Measure the gradient before it is reduced, and not again."""
    norms, land = [], self.reducing._land

    def measuring() -> None:
        norms.append(type(self).grad_norm(self))
        land()

    self.reducing._land = measuring
    original(self, loss, last=last)
    del self.reducing._land
    if last:
        self.grad_norm = lambda: norms[0]


def unclipped(original: Any, self: Any) -> None:
    limit, self.max_grad_norm = self.max_grad_norm, 0.0
    original(self)
    self.max_grad_norm = limit


def clipped_one_by_one(original: Any, self: Any) -> None:
    if self.grad_norm() > self.max_grad_norm:
        for master in self.masters.values():
            master.grad /= max(1.0, float(master.grad.norm()) / self.max_grad_norm)
    unclipped(original, self)


def all_decay(original: Any, policy: Any, weight_decay: float) -> Any:
    return [group | {"weight_decay": weight_decay} for group in original(policy, weight_decay)]


PLAIN, BASE_ENGINE, FSDP2 = "engine.plain:PlainEngine.", "engine.base:", "engine.fsdp2:FSDP2Engine."
REDUCING = "engine.reducing:Reducing."
ENGINE_FAULTS = (
    one("summed, not averaged", REDUCING + "_land", summed, "gradient", ENGINE),
    one("reduced over the ring only", REDUCING + "_send_complete",
        Seeing({"dist.all_reduce": Given(in_the_ring)}), "gradient", ENGINE),
    one("not reduced", REDUCING + "_send_complete", nothing, "gradient", ENGINE),
    one("gradients are not zeroed", PLAIN + "_clip_and_step", not_zeroed, "gradient", ENGINE, step=2),
    one("the last micro-batch's gradient only", PLAIN + "backward", emptied_first, "gradient", ENGINE),
    one("a parameter is left out of the reduction", REDUCING + "_land", all_but_one, "gradient", ENGINE),
    one("reduced in float32", REDUCING + "_send_complete",
        Seeing({"torch.cat": lambda cat: lambda pieces: cat(pieces).float()}), "gradient", ENGINE),
    one("the norm before the reduction", PLAIN + "backward", measured_first, "optimizer", ENGINE),
    one("not clipped", PLAIN + "_clip_and_step", unclipped, "optimizer", ENGINE),
    one("clipped parameter by parameter", PLAIN + "_clip_and_step", clipped_one_by_one, "optimizer", ENGINE),
    one("another rate", PLAIN + "step", lambda original, self, lr: original(self, lr * 1.01), "optimizer", ENGINE),
    one("gains decay too", BASE_ENGINE + "parameter_groups", all_decay, "optimizer", ENGINE),
    one("nothing decays", BASE_ENGINE + "parameter_groups", lambda original, policy, _decay: original(policy, 0.0),
        "optimizer", ENGINE),
    one("other betas", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, betas=[optim.betas[0], 0.99])),
        "optimizer", ENGINE, step=2),
    one("another eps", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, eps=1e-7)), "optimizer",
        ENGINE),
    one("Adam for descent", BASE_ENGINE + "optimizer_for",
        lambda original, policy, optim: original(policy, replace(optim, name=OptimName.adamw)),
        "optimizer", ENGINE, "optim=sgd", "optim.lr=0.05"),
    one("float32 parameters", PLAIN + "__init__",
        Seeing({"cast_parameters": lambda cast: lambda policy, _dtype: cast(policy, torch.float32)}),
        "log-probabilities", ENGINE),
    one("the norm of one rank's pieces", FSDP2 + "grad_norm", Seeing({"dist.all_reduce": left_out}), "optimizer",
        ENGINE, "engine=fsdp2"),
    one("FSDP2 does not accumulate", FSDP2 + "backward", emptied_first, "gradient", ENGINE, "engine=fsdp2"),
)  # fmt: skip


# ---- metrics ----


def every_rank_counts(original: Any, self: Any, where: Any, name: str, value: Any, spread: Any) -> None:
    original(self, where, name, value, SHARDED if where is self._sums else spread)


def last_value(original: Any, self: Any, where: Any, name: str, *args: Any) -> None:
    where.pop(name, None)
    original(self, where, name, *args)


METER = "metrics.meter:Meter."
METRICS_FAULTS = (
    one("replicated sums counted on every rank", METER + "_add", every_rank_counts, "metrics", METRICS),
    one("mean over the ranks", METER + "_means",
        lambda original, self, sums, counts: original(self, [each / self.world.size for each in sums], counts),
        "metrics", METRICS),
    one("the last micro-batch's values", METER + "_add", last_value, "metrics", METRICS),
    one("rank 0's values", "metrics.meter:_gather", lambda original, *args: original(*args)[:1], "metrics", METRICS),
)  # fmt: skip


# ---- the run's own precision and engine ----


def second_step_off(original: Any, engine: Any, loss: Any, last: bool) -> None:
    original(engine, loss * (1.001 if engine.global_steps else 1.0), last)


def added_in_bfloat16(original: Any, self: Any, parameter: Any, master: Any) -> None:
    """Round the sum, in a hook behind the one that adds a gradient to its master."""
    original(self, parameter, master)

    def round_sum(_low: Any) -> None:  # what a hook returns would be the new value
        master.grad.copy_(master.grad.bfloat16())

    parameter.register_post_accumulate_grad_hook(round_sum)


ZERO = "engine.zero:"
OWN_FAULTS = (
    one("ZeRO-1 doubles the gradient", ZERO + "_backward",
        lambda original, engine, loss, last: original(engine, loss * 2, last), "gradient", ENGINE, base=BASE),
    one("ZeRO-1 steps by another rate", ZERO + "Stage12.step",
        lambda original, self, lr: original(self, lr * 1.05), "optimizer", ENGINE, base=BASE),
    one("ZeRO-1 does not accumulate", ZERO + "_backward",
        lambda original, engine, loss, _last: original(engine, loss, True), "gradient", ENGINE, base=BASE),
    one("ZeRO-1 is wrong from its second step on", ZERO + "_backward", second_step_off, "gradient", ENGINE, step=2,
        base=BASE),
    one("ZeRO-2 keeps the last micro-batch", ZERO + "Stage12.backward",
        lambda original, self, loss, last: original(self, loss if last else loss * 0.0, last=last), "gradient",
        ENGINE, "engine=zero2", base=BASE),
    one("DeepSpeed's own clipping", ZERO + "ds_config",
        lambda original, *args: original(*args) | {"gradient_clipping": 0.1}, "optimizer", ENGINE, "optim=sgd",
        "optim.lr=0.05", base=BASE),
    one("masters from bfloat16", ZERO + "Stage12._restore_bits", nothing, "log-probabilities", ENGINE,
        "train.precision=bf16", base=BASE),
    one("bfloat16 copies are not renewed", PLAIN + "_copy_down", nothing, "log-probabilities", ENGINE,
        "train.precision=bf16", "engine=torch", base=BASE),
    one("bfloat16 gradients added up in bfloat16", PLAIN + "_take_gradients", added_in_bfloat16, "gradient", ENGINE,
        "train.precision=bf16", "engine=torch", base=BASE),
    one("ZeRO-3's reference is another", ZERO + "frozen",
        lambda original, cfg, starting, _dtype: original(cfg, starting, torch.bfloat16), "log-probabilities", ENGINE,
        "engine=zero3", base=BASE),
)  # fmt: skip

FAULTS = (*DATA_FAULTS, *RING_FAULTS, *MODEL_FAULTS, *ALGOS_FAULTS, *TRAIN_FAULTS, *ENGINE_FAULTS, *METRICS_FAULTS,
          *OWN_FAULTS)  # fmt: skip

# Not a defect: `verify` is to believe that a model of six layers is too large for this machine.
LITTLE_MEMORY = one("little memory", "verify.fit_memory:free_on_host", lambda _original: 120_000_000, "", "")


class Whole(torch.autograd.Function):
    """Gather the whole sequence on every rank and keep it. Values and gradients are those of the rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Any) -> Any:
        size = dist.get_world_size()
        if size == 1:
            return hidden.clone()
        whole = hidden.new_empty(size, *hidden.shape)
        all_gather(whole.view(-1), hidden.contiguous().view(-1))
        ctx.save_for_backward(whole)
        return whole[dist.get_rank()].clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


# Not a difference: the values are right, and each layer's MLP keeps the whole sequence on every rank of the ring.
WHOLE_SEQUENCE = one("an MLP gathers the sequence", "transformers.models.llama.modeling_llama:LlamaMLP.forward",
                     lambda original, self, hidden: original(self, Whole.apply(hidden)), "", "")  # fmt: skip

# `make test` plants one of each stage, room and mechanism; they share one float64 reference. `make check` adds one of
# each other pair of stage and room, and of the other layouts and engines. `make prove` plants all.
FAST = (
    "replicas overlap", "targets shifted after sharding", "not causal", "log-probability of the token itself",
    "divided by the accumulation again", "beta is forgotten", "reduced over the ring only", "not clipped",
    "replicated sums counted on every rank", "ZeRO-1 doubles the gradient",
)  # fmt: skip
CHECK = (
    "a replica takes the other's pairs", "sums in float32", "bfloat16 copies are not renewed",
    "keys do not move on in the backward", "the head does not hand its gradient down", "the next step's rate",
    "mean logits", "rewards without beta", "total tokens start anew", "FSDP2 does not accumulate",
    "heads in another order", "gradients of gathered keys", "a pack ignores masks",
)  # fmt: skip

ALL_FAULTS = {fault.name: fault for fault in (*FAULTS, LITTLE_MEMORY, WHOLE_SEQUENCE)}
