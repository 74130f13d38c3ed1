"""Held-out examples by the length of their sequences, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlexp.training.algos.base import Losses
from rlexp.training.metrics.meter import Meter
from rlexp.training.train.by_length import Buckets
from rlexp.training.types import Pair
from rlexp.training.world.groups import ALONE, World

PROMPT = np.zeros(3, dtype=np.int32)


def pair_of(chosen: int, rejected: int) -> Pair:
    answers = (np.zeros(length, dtype=np.int32) for length in (chosen, rejected))
    return Pair(0, PROMPT, *answers, "row 1")


def test_an_example_as_long_as_a_bound_counts_in_the_part_before_it() -> None:
    """Its length is that of its longest sequence, whichever answer that is, with the prompt."""
    pairs = [pair_of(*lengths) for lengths in ((7, 2), (1, 7), (8, 1), (2, 17), (18, 1))]  # 10, 10, 11, 20, 21 tokens
    losses = Losses(
        losses_E=torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]),
        metrics_E={"rewards/accuracies": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])},
    )
    meter, buckets = Meter(World(0, 1, ALONE), torch.device("cpu")), Buckets([10, 20])
    buckets.note(meter, pairs[:2], part_of(losses, slice(2)))
    buckets.note(meter, pairs[2:], part_of(losses, slice(2, None)))
    found = buckets.completed(meter.reduce())
    for name, examples, loss, accuracy in (("0-10", 2, 1.5, 0.5), ("10-20", 2, 6.0, 1.0), ("20+", 1, 16.0, 0.0)):
        assert found[f"{name}/examples"] == examples
        assert found[f"{name}/share"] == pytest.approx(examples / 5, rel=1e-15)
        assert (found[f"{name}/loss"], found[f"{name}/accuracy"]) == (loss, accuracy)


def part_of(losses: Losses, which: slice) -> Losses:
    return Losses(losses.losses_E[which], {name: each_E[which] for name, each_E in losses.metrics_E.items()})
