"""Defects of a reference that is computed before training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers.faults.base import MIXED, TRAIN, one


def of_another(original: Any, self: Any, example: int, answer: int) -> Any:
    """Return the values of the next example, as many as the example has."""
    rows, own = self.rows, original(self, example, answer)
    places = range(len(rows.examples)) if rows.places is None else rows.places
    return np.resize(original(self, int(places[(rows.number(example) + 1) % len(rows)]), answer), len(own))


def of_other_weights(original: Any, setting: Any, model: Any, *args: Any) -> Any:
    return original(setting, (replace(model[0], seed=model[0].seed + 1), model[1]), *args)


BEFORE = "reference=precompute"
REFERENCE_FAULTS = (
    one("a stored row of another sample", "reference.stored:Kept.of", of_another, "log-probabilities", TRAIN, BEFORE),
    # With rows of files the defect has a cache of its own: what is kept there is wrong under the right key.
    one("a stored reference is stale", "train.build:frozen_model", of_other_weights, "log-probabilities", TRAIN, BEFORE,
        base=MIXED),
)  # fmt: skip
