"""Defects of metrics."""

from __future__ import annotations

from typing import Any

from rlexp.training.metrics.meter import SHARDED
from tests.helpers.faults.base import (
    METRICS,
    one,
)


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
