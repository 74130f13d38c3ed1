"""Defects of deals: of how many ranks hold a sequence, and which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.helpers.faults.base import FP64, RING, ROWS, TRAIN, one

# One of four pairs is longer than the others together: it is cut, and they are held whole.
UNEVEN = (*(word for word in FP64 if not word.startswith("data.")), "parallel=ring4", "parallel.cut=auto", "data=jsonl",
          f"data.path={ROWS}/uneven.jsonl", "data.max_length=900", "train.batch_size=4", "launch.nproc=4",
          "train.micro_batch_size=4", "data.eval_size=0", "data.shuffle=false")  # fmt: skip


def held_twice(original: Any, segment: Any, parts: Any) -> Any:
    """Let a second rank hold what one rank holds whole."""
    chunks = original(segment, parts)
    return chunks if len(parts) > 1 else [*chunks, ((parts[0][0] + 1) % 4, chunks[0][1])]


def lost(original: Any, segment: Any, parts: Any) -> Any:
    """Let nobody hold every second length of what one rank should hold whole."""
    return [] if len(parts) == 1 and segment.length % 2 else original(segment, parts)


def of_the_neighbour(original: Any, segment: Any, parts: Any) -> Any:
    """Cut off the last token of what is cut: as many tokens as a neighbour has that is shorter."""
    return (
        original(segment, parts) if len(parts) < 2 else original(segment, ((parts[0][0], parts[0][1] - 1), *parts[1:]))
    )


def among_the_first(original: Any, values_n: Any, shard: Any) -> Any:
    """Let only as many of the first ranks add to a sequence's sum as hold it."""
    sums_S = original(values_n, shard)
    if shard.estimate is None:  # all are cut alike
        return sums_S
    return torch.where(torch.tensor(shard.widths_S) > shard.ring.rank, sums_S, torch.zeros_like(sums_S))


def one_rank_deals_alone(original: Any, self: Any, segments: Any, ring: Any, *args: Any) -> Any:
    """Let the last rank plan for another deal than the others have."""
    return original(replace(self, costs=None) if ring.rank == ring.size - 1 else self, segments, ring, *args)


CHUNKS = "ring.layouts.ringwise:chunks_of"
WIDTHS_FAULTS = (
    one("a sequence held twice", CHUNKS, held_twice, "data", RING, base=UNEVEN),
    one("a sequence that nobody holds", CHUNKS, lost, "data", RING, base=UNEVEN),
    one("a chunk with the neighbour's width", CHUNKS, of_the_neighbour, "data", RING, base=UNEVEN),
    one("summed over the wrong ranks", "train.rows_task:sum_by_sequence", among_the_first, "log-probabilities", TRAIN,
        base=UNEVEN),
    one("a width that differs between ranks", "ring.layouts.ringwise:Ringwise.plan", one_rank_deals_alone, "running",
        RING, base=UNEVEN),
)  # fmt: skip
