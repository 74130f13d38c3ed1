"""Defects of metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlexp.training.metrics.meter import SHARDED
from tests.helpers.faults.base import METRICS, TRAIN, one
from tests.helpers.faults.losses import HELD_OUT
from tests.helpers.faults.plant import Seeing


def every_rank_counts(original: Any, self: Any, where: Any, name: str, value: Any, spread: Any) -> None:
    original(self, where, name, value, SHARDED if where is self._sums else spread)


def last_value(original: Any, self: Any, where: Any, name: str, *args: Any) -> None:
    where.pop(name, None)
    original(self, where, name, *args)


def bounds_in_the_next(search: Any) -> Any:
    return lambda bounds, lengths, side: search(bounds, lengths, side={"left": "right", "right": "left"}[side])


def of_the_first_answer(original: Any, self: Any, meter: Any, examples: Any, losses: Any) -> None:
    original(self, meter, [replace(each, answers=each.answers[:1]) for each in examples], losses)


def rows_as_shares(original: Any, self: Any, meter: Any, examples: Any, losses: Any) -> None:
    """Take a row's share of the denominator to be 1, also where a loss counts its tokens."""
    original(self, meter, examples, replace(losses, weights_E={}))


def without_ring_tokens(original: Any, *args: Any) -> Any:
    row = original(*args)
    return {name: value for name, value in row.items() if not name.endswith("ring_tokens")}


# Held-out sequences of 126 and of 145 tokens lie on the bounds.
PARTS = (*HELD_OUT, "eval.buckets=[126,145]")
METER = "metrics.meter:Meter."
METRICS_FAULTS = (
    one("replicated sums counted on every rank", METER + "_add", every_rank_counts, "metrics", METRICS),
    one("mean over the ranks", METER + "_means",
        lambda original, self, sums, counts: original(self, [each / self.world.size for each in sums], counts),
        "metrics", METRICS),
    one("the last micro-batch's values", METER + "_add", last_value, "metrics", METRICS),
    one("a bound belongs to the part after it", "train.by_length:Buckets.note",
        Seeing({"np.searchsorted": bounds_in_the_next}), "metrics", TRAIN, *PARTS),
    one("the length of the first answer", "train.by_length:Buckets.note", of_the_first_answer, "metrics", TRAIN,
        *PARTS),
    one("sft: rows as shares of a part's loss", "train.by_length:Buckets.note", rows_as_shares, "metrics", TRAIN,
        *PARTS, "loss=sft"),
    one("the ring's tokens are not logged", "train.step:row_of", without_ring_tokens, "metrics", TRAIN),
    one("a difference the other way round", METER + "add_difference",
        lambda original, self, name, one, other: original(self, name, other, one), "metrics", METRICS, "loss=kto"),
    one("rank 0's values", "metrics.meter:_gather", lambda original, *args: original(*args)[:1], "metrics", METRICS),
)  # fmt: skip
