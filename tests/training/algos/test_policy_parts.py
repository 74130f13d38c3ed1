"""What the losses of reinforcement learning are made of, by hand, and the values of theirs that are refused."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.base.errors import ConfigError
from rlexp.config.checks.loss import check_loss
from rlexp.config.schema import Config
from rlexp.config.schema.bounds import check_bounds
from rlexp.config.schema.losses import CriticName, DPOConfig, GRPOConfig, KLEstimator, KLPlace, Normalize
from rlexp.training.algos.advantages import (
    centred,
    gae,
    mean_and_variance,
    returns_to_go,
    sequence_weight,
    token_rewards,
    token_weight,
    whiten,
)
from rlexp.training.algos.policy import KLController, estimate
from rlexp.training.train.rollout_task import SamplesMicroBatch, Weighed, everything, laid_out, tokens_of
from rlexp.training.types import CreditedSample, TokenLogps, Wanted
from tests.helpers.policy_losses import FIXED, GROUPED, LOSSES, Numbers, built, close, configured, k_of, tensor


def test_gae_is_its_definition_and_its_two_ends_are_known() -> None:
    draw = random.Random(1)
    rewards, values = ([draw.gauss(0, 1) for _ in range(40)] for _ in range(2))
    to_go = returns_to_go(tensor(rewards)).tolist()
    close(to_go, [sum(rewards[t:]) for t in range(40)])
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)):
        got = gae(tensor(rewards), tensor(values), gamma, lam).tolist()
        deltas = [rewards[t] + gamma * [*values, 0.0][t + 1] - values[t] for t in range(40)]
        close(got, [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 40)) for t in range(40)])
    close(gae(tensor(rewards), tensor(values), 1.0, 1.0).tolist(), [g - v for g, v in zip(to_go, values, strict=True)])


def test_an_empty_answer_is_paid_nothing() -> None:
    empty = torch.zeros(0)
    assert (
        token_rewards(1.0, empty, 0.1).shape == gae(empty, empty, 1.0, 0.95).shape == returns_to_go(empty).shape == (0,)
    )
    assert token_rewards(1.0, tensor([2.0, 3.0]), 0.1).tolist() == pytest.approx([-0.2, 0.7])
    kept = tensor([2.0])
    token_rewards(1.0, kept, 1.0)
    assert kept.tolist() == [2.0]


def test_whitening_is_by_the_tokens_that_count() -> None:
    advantages = [tensor([1.0, 2.0]), tensor([100.0]), tensor([]), tensor([6.0])]
    got = whiten(advantages, torch.tensor([True, False, True, True]))
    deviation = math.sqrt((4 + 1 + 9) / 2 + 1e-8)  # about the mean, 3
    wanted: Numbers = [[-2 / deviation, -1 / deviation], [0.0], [], [3 / deviation]]
    for each, values in zip(got, wanted, strict=True):
        close(each.tolist(), values)
    every = torch.cat([got[0], got[3]])
    assert float(every.mean()) == pytest.approx(0.0, abs=1e-15)
    assert float(every.var()) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("lengths", [(3, 2), (1,), (0,), (0, 0), ()])
def test_whitening_leaves_nothing_of_what_is_all_alike(lengths: tuple[int, ...]) -> None:
    advantages = [torch.full((length,), 0.1, dtype=torch.float64) for length in lengths]
    for got in whiten(advantages, torch.ones(len(lengths))):
        assert got.eq(0).all()
    assert centred(tensor([0.1] * 3)).tolist() == [0.0] * 3


def test_mean_and_variance_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(length, dtype=torch.float64) * 3 + 1000 for length in (5, 2, 1, 200)]
    whole = torch.cat(parts)
    assert mean_and_variance(parts) == pytest.approx((float(whole.mean()), float(whole.var())), rel=1e-13)


def test_weights_by_hand() -> None:
    lengths, counts = torch.tensor([1, 3, 0, 5]), torch.tensor([True, True, True, False])
    expected = {
        Normalize.token: [1 / 4, 1 / 4, 0, 0],
        Normalize.sequence: [1 / 3, 1 / 9, 0, 0],
        Normalize.fixed: [1 / 24, 1 / 24, 0, 0],
    }
    for normalize, wanted in expected.items():
        assert token_weight(normalize, lengths, counts, FIXED).tolist() == pytest.approx(wanted, rel=1e-15)
        for none in (torch.zeros(4), torch.tensor([0, 0, 1, 0])):
            assert token_weight(normalize, lengths, none, FIXED).tolist() == [0.0] * 4
        assert token_weight(normalize, lengths[:0], counts[:0], FIXED).shape == (0,)
    assert sequence_weight(counts).tolist() == pytest.approx([1 / 3] * 3 + [0.0], rel=1e-15)
    assert sequence_weight(torch.zeros(4)).tolist() == [0.0] * 4


def test_estimators_and_their_slopes() -> None:
    for value in (-2.0, -1e-5, 0.0, 1e-5, 2.0):
        for kind in KLEstimator:
            d = tensor([value]).requires_grad_()
            estimate(kind, d).backward()
            assert d.grad is not None
            slope = complex(k_of(kind, complex(value, 1e-30))).imag / 1e-30
            assert float(d.grad) == pytest.approx(slope, rel=1e-14, abs=1e-15)
    tiny = torch.tensor([1e-4])  # float32, where exp(−d) − 1 + d has no correct digit
    assert float(estimate(KLEstimator.k3, tiny)) == pytest.approx(5e-9, rel=2e-3)


def test_the_coefficient_follows_the_divergence() -> None:
    controller = KLController(beta=0.1, target=2.0, horizon=1000)
    controller.update(2.0, 100)
    assert controller.beta == 0.1
    controller.update(2.2, 100)  # 10 % above: + 10 % × 100 / 1000
    assert controller.beta == pytest.approx(0.101, rel=1e-14)
    controller.update(40.0, 100)
    assert controller.beta == pytest.approx(0.101 * 1.02, rel=1e-14)
    controller.update(-1.0, 100_000)  # k1 may be negative; more samples than the horizon count as the horizon
    assert controller.beta == pytest.approx(0.101 * 1.02 * 0.8, rel=1e-14)
    fixed = KLController(0.1, None, 1000)
    fixed.update(40.0, 100)
    assert fixed.beta == 0.1


# ---- values that are refused ----------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"beta": -0.1}, "loss.beta=-0.1: must be at least 0."),
    ("ppo", {"beta": math.nan}, "loss.beta=nan: must be at least 0."),
    ("grpo", {"clip_low": 0.0}, "loss.clip_low=0.0: must be greater than 0."),
    ("gspo", {"clip_high": -1.0}, "loss.clip_high=-1.0: must be greater than 0."),
    ("rloo", {"entropy": -0.1}, "loss.entropy=-0.1: must be at least 0."),
    ("ppo", {"dual_clip": 1.0}, "loss.dual_clip=1.0: must be greater than 1 (3 is usual), or null."),
    ("ppo", {"kl_target": 0.0}, "loss.kl_target=0.0: must be greater than 0, or null."),
    ("dr_grpo", {"kl_target": 6.0}, "loss.kl_target=6.0: adapts loss.beta, which starts at 0 and would stay there."),
    ("ppo", {"kl_horizon": 0}, "loss.kl_horizon=0: must be at least 1"),
    ("ppo", {"kl_in": KLPlace.loss}, "loss.kl=k1: with loss.kl_in=loss its gradient does not depend on"),
    ("ppo", {"gamma": 1.5}, "loss.gamma=1.5: must be at least 0 and at most 1."),
    ("ppo", {"lam": -0.5}, "loss.lam=-0.5: must be at least 0 and at most 1."),
    ("ppo", {"value_coef": -1.0}, "loss.value_coef=-1.0: must be at least 0."),
    ("ppo", {"value_clip": 0.0}, "loss.value_clip=0.0: must be greater than 0, or null."),
    ("ppo", {"value_lr": -1.0}, "loss.value_lr=-1.0: must be at least 0, or null."),
    (
        "ppo",
        {"value_lr": 1e-3, "critic": CriticName.shared},
        "loss.value_lr=0.001: loss.critic=shared uses the policy's",
    ),
]


def _check(cfg: Config) -> None:
    check_bounds(cfg.loss, "loss.")
    check_loss(cfg)


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED, ids=lambda each: str(each)[:40])
def test_values_that_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(Config(loss=configured(name, **changes)))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("name", LOSSES)
def test_one_answer_to_a_prompt_is_refused_where_it_learns_nothing(name: str) -> None:
    cfg = Config(loss=configured(name))
    check_loss(cfg)
    cfg.rollout.n_samples = 1
    if name in GROUPED:
        with pytest.raises(ConfigError, match=r"rollout\.n_samples=1: .* Use rollout\.n_samples=2 or more"):
            check_loss(cfg)
    else:
        check_loss(cfg)
        cfg.loss = configured(name, filter=True)
        with pytest.raises(ConfigError, match=r"rollout\.n_samples=1: with loss\.filter=true"):
            check_loss(cfg)


def test_a_loss_of_pairs_is_not_looked_at() -> None:
    cfg = Config(loss=DPOConfig())
    cfg.rollout.n_samples = 1
    check_loss(cfg)


def test_a_token_of_probability_0_that_does_not_count_leaves_the_loss_a_number() -> None:
    """Its log-probability is −inf, and 0 × −inf is no number."""
    logps_n = tensor([-1.0, -math.inf]).requires_grad_()
    shared: dict[str, Any] = {"example": None, "number": 0, "answer": [5], "stopped": True, "text": "", "score": 1.0}
    samples = [
        CreditedSample(place=place, counts=not place, terms={}, advantages=np.ones(1), **shared,
                       **dict.fromkeys(("old", "behaviour", "reference"), logps_n.detach().numpy()[place : place + 1]))
        for place in range(2)
    ]  # fmt: skip
    task: Any = SimpleNamespace(run=SimpleNamespace(dtype=torch.float64), wanted=Wanted(reference=True))
    shard: Any = SimpleNamespace(listed_n=torch.arange(2), sequence_n=torch.arange(2))
    known = laid_out(task, Weighed(samples, [torch.ones(1)] * 2, *torch.eye(2)), [0, 1], shard)
    outputs = TokenLogps(logps_n, torch.zeros(2), entropies_n=torch.zeros(2))
    tokens = tokens_of(SamplesMicroBatch(shard, tuple(samples), known), outputs)
    terms = built(GRPOConfig())(tokens, 0.04)
    (terms.loss + 0.0 * everything(tokens)).backward()
    assert all(torch.isfinite(each).all() for each in (terms.loss, *terms.means_n.values()))
    assert logps_n.grad is not None
    assert logps_n.grad.tolist() == [-1.0, 0.0]
