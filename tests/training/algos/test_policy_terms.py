"""Metered values, whose faults a comparison of layouts would not show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlexp.training.algos.policy_loss import PolicyTerms
from rlexp.training.metrics.meter import Meter
from rlexp.training.train.rollout_task import note


@pytest.mark.parametrize(("rank", "loss"), [(0, 3.0), (1, 1.0)])
def test_what_is_metered(rank: int, loss: float) -> None:
    """A sequence term is whole on every rank of a ring, so only the first rank's is metered.

    Means and peaks are over trained tokens. Elsewhere the ratio is 1, which may exceed that of all tokens that count.
    """
    world: Any = SimpleNamespace(size=1, ring=SimpleNamespace(rank=rank))
    meter = Meter(world, torch.device("cpu"))
    ratio = torch.tensor([1.0, 0.5, 0.7, 1.0])
    terms = PolicyTerms(torch.tensor(3.0), {"part": torch.tensor(1.0)}, {"whole": torch.tensor(2.0)},
                        {"ratio": ratio}, {"peak": ratio})  # fmt: skip
    tokens: Any = SimpleNamespace(trained_n=torch.tensor([0.0, 1.0, 1.0, 0.0]))
    note(terms, tokens, meter)
    metered = meter.reduce()
    assert metered["loss"] == loss
    assert metered["part"] == 1.0
    assert metered["whole"] == loss - 1.0
    assert metered["ratio"] == pytest.approx(0.6)
    assert metered["peak"] == pytest.approx(0.7)
