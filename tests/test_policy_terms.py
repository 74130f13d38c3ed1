"""Entropy gradients and metered values, whose faults a comparison of layouts would not show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlexp.algos.policy import PolicyTerms
from rlexp.metrics.meter import Meter
from rlexp.model import policy
from rlexp.model.policy import Entropy, HeadLogps
from rlexp.train.rollout_task import note
from tests.ranks import seeded

TEMPERATURE = 0.7


@pytest.mark.parametrize("rows", [100, 2], ids=["at once", "some rows at a time"])
def test_the_entropy_that_is_trained_has_its_gradient(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The entropy is −Σ p·log p of the distribution that tokens are drawn from, for trained tokens only."""
    monkeypatch.setattr(policy, "LOGITS", 11 * rows)
    weight, hidden = seeded(11, 4).requires_grad_(), seeded(6, 4, seed=1).requires_grad_()
    shard: Any = SimpleNamespace(sequence_t=torch.tensor([-1, 0, 0, -1, 1, 1]), targets_t=torch.arange(6))
    p = (hidden @ weight.T / TEMPERATURE).softmax(-1)
    expected = torch.where(shard.sequence_t >= 0, -(p * p.log()).sum(-1), 0.0)
    wanted = torch.autograd.grad(expected.sum(), [weight, hidden])
    said = HeadLogps(TEMPERATURE, Entropy.trained)(weight, None, hidden, shard)
    assert said.entropy_t is not None
    torch.testing.assert_close(said.entropy_t, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(said.entropy_t.sum(), [weight, hidden]), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    logged = HeadLogps(TEMPERATURE, Entropy.logged)(weight, None, hidden, shard)
    assert logged.entropy_t is not None
    assert not logged.entropy_t.requires_grad
    torch.testing.assert_close(logged.entropy_t, expected, rtol=1e-12, atol=1e-12)


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
    tokens: Any = SimpleNamespace(trained_t=torch.tensor([0.0, 1.0, 1.0, 0.0]))
    note(terms, tokens, meter)
    metered = meter.reduce()
    assert metered["loss"] == loss
    assert metered["part"] == 1.0
    assert metered["whole"] == loss - 1.0
    assert metered["ratio"] == pytest.approx(0.6)
    assert metered["peak"] == pytest.approx(0.7)
