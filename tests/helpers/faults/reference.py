"""Defects of references: a model that is loaded a second time, the policy without its adapter, and stored values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.helpers.faults.adapter import LORA
from tests.helpers.faults.base import ENGINE, MIXED, MODEL, REFERENCE, TRAIN, one
from tests.helpers.faults.starting import forward_rounded


def of_another(original: Any, self: Any, example: int, answer: int) -> Any:
    """Return the values of the next example, as many as the example has."""
    rows, own = self.rows, original(self, example, answer)
    places = range(len(rows.examples)) if rows.places is None else rows.places
    return np.resize(original(self, int(places[(rows.number(example) + 1) % len(rows)]), answer), len(own))


def of_other_weights(original: Any, setting: Any, model: Any, *args: Any) -> Any:
    return original(setting, (replace(model[0], seed=model[0].seed + 1), model[1]), *args)


def neighbours(original: Any, self: Any, shard: Any) -> Any:
    return original(self, shard).roll(1)


def as_trained(_original: Any, self: Any, shard: Any) -> Any:
    """Leave the trained adapter on."""
    with torch.no_grad():
        return self.engine.forward(shard).logps_n


def placed_one_off(original: Any, self: Any, pack: Any, shard: Any) -> Any:
    known = original(self, pack, shard)
    return replace(known, known_n=known.known_n.roll(1))


def scaled_values(original: Any, self: Any, *args: Any) -> Any:
    return [values * (1 + 1e-7) for values in original(self, *args)]


def scaled_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Load every model but the first one of a process with other weights."""
    model = original(*args, **kwargs)
    if LOADED:
        model.get_output_embeddings().weight.data *= 1 + 1e-6
    LOADED.append(True)
    return model


LOADED: list[bool] = []
BEFORE = "reference=precompute"
STORED = "reference.stored:"
REFERENCE_FAULTS = (
    one("a stored row of another sample", STORED + "Kept.of", of_another, "log-probabilities", REFERENCE, BEFORE),
    # With rows of files the defect has a cache of its own: what is kept there is wrong under the right key.
    one("a stored reference is stale", "train.build:frozen_model", of_other_weights, "log-probabilities", TRAIN, BEFORE,
        base=MIXED),
    one("stored values are placed one token off", STORED + "Stored.known", placed_one_off, "log-probabilities",
        REFERENCE, BEFORE),
    one("stored values of few bits", STORED + "kept_dtype", lambda *_: np.dtype(np.float32), "log-probabilities",
        REFERENCE, BEFORE, base=MIXED),
    one("values are computed wrong before training", "train.precompute:_Keeper.values", scaled_values,
        "log-probabilities", TRAIN, BEFORE, base=MIXED),
    one("a reference model's answers one token off", "reference.models:OfModel.logps", neighbours, "log-probabilities",
        REFERENCE),
    one("the trained adapter as the reference", "reference.models:OfAdapter.logps", as_trained, "log-probabilities",
        REFERENCE, base=LORA, step=2),
    one("a reference model that is loaded otherwise", "model.loading:load_model", scaled_weights, "log-probabilities",
        MODEL),
    one("a frozen model's forward pass differs", "engine.frozen:Frozen.forward", forward_rounded("Frozen"),
        "log-probabilities", ENGINE),
    one("a reference model of another seed", "train.build:frozen_model", of_other_weights, "log-probabilities", TRAIN),
)  # fmt: skip

# Found only by a second run, which finds the values of another model under its own key.
SAME_KEY = one("a key without the model", STORED + "facts_of", lambda original, *args: original(*args) | {"model": 0},
               "log-probabilities", REFERENCE, BEFORE)  # fmt: skip
