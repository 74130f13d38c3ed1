"""Held-out examples by the length of their sequences, counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlexp.base.wilson import wilson
from rlexp.training.algos.base import Losses
from rlexp.training.metrics.meter import Meter
from rlexp.training.train.by_length import Buckets
from rlexp.training.types import Example
from rlexp.training.world.groups import World
from tests.helpers.played_ranks import Played

PROMPT = np.zeros(3, dtype=np.int32)


def pair_of(chosen: int, rejected: int) -> Example:
    answers = (np.zeros(length, dtype=np.int32) for length in (chosen, rejected))
    return Example(0, PROMPT, tuple(answers), origin="row 1")


TOKENS = [1.0, 3.0, 2.0, 4.0, 5.0]  # by which supervised training weighs its examples


@pytest.mark.parametrize("weights", [[1.0] * 5, TOKENS], ids=["pairs", "supervised"])
def test_an_example_as_long_as_a_bound_counts_in_the_part_before_it(weights: list[float]) -> None:
    """Its length is that of its longest sequence, whichever answer that is, with the prompt. Two examples are on one
    ring, and three on the other."""
    pairs = [pair_of(*lengths) for lengths in ((7, 2), (1, 7), (8, 1), (2, 17), (18, 1))]  # 10, 10, 11, 20, 21 tokens
    each, hits, name = [1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 0.0, 1.0, 1.0, 0.0], "rewards/accuracies"
    known = {} if weights[0] == weights[1] else {"loss": torch.tensor(weights) / 3, name: torch.tensor(weights)}
    losses = Losses(torch.tensor(each), {name: torch.tensor(hits)}, known)
    buckets = Buckets([10, 20])

    def note(world: World, meter: Meter) -> None:
        which = (slice(2), slice(2, None))[world.replica]
        buckets.note(meter, pairs[which], part_of(losses, which))

    found = buckets.completed(Played(4, 2).metered(note))
    for part, places in {"0-10": (0, 1), "10-20": (2, 3), "20+": (4,)}.items():
        weight, scale = sum(weights[at] for at in places), sum(weights) / 5
        share = sum(weights[at] * hits[at] for at in places) / weight
        wanted = {"examples": len(places), "share": weight / sum(weights), "accuracy": share,
                  "loss": sum(each[at] for at in places) / (weight / scale)}  # fmt: skip
        wanted["accuracy_low"], wanted["accuracy_high"] = wilson(share, weight)
        assert {key: found.get(f"{part}/{key}", math.nan) for key in wanted} == pytest.approx(wanted, rel=1e-6), part


def part_of(losses: Losses, which: slice) -> Losses:
    metrics, weights = ({name: each_E[which] for name, each_E in group.items()}
                        for group in (losses.metrics_E, losses.weights_E))  # fmt: skip
    return Losses(losses.losses_E[which], metrics, weights)
