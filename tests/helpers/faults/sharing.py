"""Defects of what sequences share: branches, their positions, and trained tokens that several sequences have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.helpers.faults.base import DEALER, FP64, RING, ROWS, TRAIN, one

# Pairs whose answers begin alike, so that trained tokens are shared.
ALIKE = (*(word for word in FP64 if not word.startswith("data.")), "data=jsonl", f"data.path={ROWS}/alike.jsonl",
         "data.drop_last=false", "train.micro_batch_size=4")  # fmt: skip


def branches_begin_untrained(original: Any, *args: Any, **kwargs: Any) -> Any:
    pack = original(*args, **kwargs)
    begins = {segment.start for segment in pack.segments if segment.parent is not None}
    kept = torch.tensor([place not in begins for place in pack.place_N.tolist()])
    return replace(pack, place_N=pack.place_N[kept], sequence_N=pack.sequence_N[kept])


def positions_begin_anew(original: Any, *args: Any, **kwargs: Any) -> Any:
    pack = original(*args, **kwargs)
    for segment in pack.segments:
        if segment.parent is not None:
            pack.positions_T[segment.start : segment.start + segment.length] = torch.arange(segment.length)
    return pack


def siblings_see(original: Any, segments: Any, window: Any) -> Any:
    """Let the second child of a segment follow the first."""
    followed = [
        replace(each, parent=number - 1)
        if each.parent is not None and number and segments[number - 1].parent == each.parent
        else each
        for number, each in enumerate(segments)
    ]
    return original(followed, window)


def of_one_child(original: Any, self: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *how: Any) -> Any:
    """Give the keys that many queries see the gradient of the first half of them."""
    whole = original(self, dout, q, k, v, out, lse, *how)
    if how[0].causal:
        return whole
    half = dout.clone()
    half[len(half) // 2 :] = 0
    return (whole[0], *original(self, half, q, k, v, out, lse, *how)[1:])


def for_one_sequence(original: Any, *args: Any) -> Any:
    shard = original(*args)
    if shard.reads_n is None:
        return shard
    first = _firsts(shard.reads_n).unique()
    return replace(shard, reads_n=None, sequence_n=shard.sequence_n[first], listed_n=shard.listed_n[first])


def of_the_first_sequence(original: Any, *args: Any, **kwargs: Any) -> Any:
    held = original(*args, **kwargs)
    if held.shard.reads_n is None:
        return held
    return replace(held, tail_n=held.tail_n[_firsts(held.shard.reads_n)])


def _firsts(reads_n: torch.Tensor) -> torch.Tensor:
    """Return for each trained token the first that is read at its place."""
    return torch.searchsorted(reads_n, reads_n)


PACK = "dealer.packing:pack_sequences"
SHARING_FAULTS = (
    one("a branch's first target is lost", PACK, branches_begin_untrained, "data", DEALER),
    one("positions do not go on in a branch", PACK, positions_begin_anew, "data", DEALER),
    one("a child sees its sibling", "ring.layouts.ringwise:slices_of", siblings_see, "log-probabilities", RING),
    one("a prompt's gradient of one child", "ring.kernels.cpu_flash:CpuFlash.backward", of_one_child, "gradient", RING),
    one("a shared trained token counts for one sequence", "dealer.packing:shard_pack", for_one_sequence, "data", DEALER,
        base=ALIKE),
    one("a shared trained token has one sequence's weight", "train.rows_task:RowsStep.packed",
        of_the_first_sequence, "log-probabilities", TRAIN, "loss.ld_alpha=0.3", base=ALIKE),
)  # fmt: skip
