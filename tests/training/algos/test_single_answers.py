"""The losses on single answers, supervised training and reward models: by hand, and against a second writing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlexp.config.schema import KINDS
from rlexp.config.schema.losses import (
    APOZeroUnpairedConfig,
    BCOConfig,
    KTOConfig,
    RewardModelConfig,
    SFTConfig,
    Shift,
    UnpairedConfig,
)
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.build import build_loss

LABELS = [1.0, 0.0, 1.0, 0.0, 0.0]


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def values_of(ratios: Any, labels: Any = LABELS, **more: Any) -> Values:
    """Return answers with these log-ratios, of log-probabilities near −50."""
    reference = vector(range(len(ratios))) - 50
    return Values(logps={"answer": vector(ratios) + reference}, reference={"answer": reference},
                  tokens={"answer": torch.ones(len(ratios), dtype=torch.float64)}, label_E=vector(labels),
                  **more)  # fmt: skip


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def textbook(cfg: UnpairedConfig, ratios: list[float], labels: list[float], point: float) -> list[float]:
    """The losses as the papers write them. `point` is KL for kto, and δ for bco."""
    losses = []
    for ratio, good in zip(ratios, labels, strict=True):
        reward, weight = cfg.beta * ratio, cfg.desirable_weight if good else cfg.undesirable_weight
        match cfg:
            case KTOConfig():
                value = sigma(cfg.beta * (ratio - point)) if good else sigma(cfg.beta * (point - ratio))
                losses.append(weight * (1 - value))
            case BCOConfig():
                losses.append(-weight * math.log(sigma(reward - point) if good else sigma(point - reward)))
            case APOZeroUnpairedConfig():
                losses.append(weight * (1 - sigma(reward) if good else sigma(reward)))
    return losses


@pytest.mark.parametrize("cfg", [
    KTOConfig(), KTOConfig(beta=0.7, desirable_weight=1.1, undesirable_weight=0.7), BCOConfig(beta=0.4),
    BCOConfig(shift=Shift.none, undesirable_weight=0.7), APOZeroUnpairedConfig(beta=0.2, desirable_weight=1.1),
], ids=str)  # fmt: skip
def test_each_is_its_second_writing(cfg: UnpairedConfig) -> None:
    """Losses, and gradients against differences. The weights are not float32's: rounded to it, 1.1 moves by 2e-8."""
    ratios, others = np.random.default_rng(3).normal(0, 3, 5).tolist(), vector([1.0, 4.0, -0.5, 2.0, 0.5])
    point = {"kto": 1.4, "bco": cfg.beta * float(np.mean(ratios)), "apo_zero_unpaired": 0.0}[cfg.name]
    if getattr(cfg, "shift", Shift.mean) is Shift.none:
        point = 0.0
    values = values_of(ratios, mismatched_B=others)
    policy = values.logps["answer"].requires_grad_()
    losses = build_loss(cfg)(values)
    assert losses.losses_E.tolist() == pytest.approx(textbook(cfg, ratios, LABELS, point), rel=1e-13)
    (slopes,) = torch.autograd.grad(losses.losses_E.sum(), [policy])
    for place in range(5):  # the point has no gradient
        ahead, behind = (textbook(cfg, [r + d * (at == place) for at, r in enumerate(ratios)], LABELS, point)
                         for d in (1e-5, -1e-5))  # fmt: skip
        assert float(slopes[place]) == pytest.approx((sum(ahead) - sum(behind)) / 2e-5, rel=1e-6)


def test_ktos_divergence_is_clamped_once() -> None:
    """The mean over the whole batch, and then 0 if it is less: not each answer's."""

    def kl(others: list[float]) -> float:
        return float(build_loss(KTOConfig())(values_of([0.0] * 5, mismatched_B=vector(others))).metrics_E["kl"][0])

    assert kl([4.0, -1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.6)
    assert kl([-4.0, 1.0, 0.0, 0.0, 0.0]) == 0.0


def test_the_shift_of_bco_is_the_mean_of_all_rewards_so_far() -> None:
    loss = build_loss(BCOConfig(beta=0.5))
    first = loss(values_of([4.0, 2.0], [1.0, 0.0]))
    assert first.carried == {"bco/rewards": 1.5, "bco/answers": 2.0}
    second = loss(values_of([0.0, 0.0], [1.0, 1.0], carried=first.carried))
    assert second.carried == {"bco/rewards": 0.75, "bco/answers": 4.0}
    assert second.metrics_E["bco/shift"].tolist() == [0.75, 0.75]
    held_out = loss(values_of([9.0], [1.0], carried=first.carried, held_out=True))
    assert held_out.carried == first.carried


def mean(losses: Losses, name: str) -> float:
    weights = losses.weights_E.get(name, torch.ones_like(losses.losses_E))
    return float((weights * losses.metrics_E[name]).sum() / weights.sum())


def test_supervised_training_is_per_token_of_the_batch() -> None:
    tokens = vector([4.0, 1.0])
    values = Values(
        logps={"answer": vector([-8.0, -3.0])},
        reference=None,
        tokens={"answer": tokens},
        mean_tokens=2.5,
        of_tokens={"hits": {"answer": vector([3, 0])}, "entropies": {"answer": vector([2, 1.5])}},
    )
    losses = build_loss(SFTConfig())(values)
    assert float(losses.losses_E.mean()) == pytest.approx(11 / 5)
    assert mean(losses, "mean_token_accuracy") == pytest.approx(3 / 5)
    assert mean(losses, "entropy") == pytest.approx(3.5 / 5)
    assert losses.weights_E["loss"].tolist() == [1.6, 0.4]


def test_a_reward_model_by_hand() -> None:
    values = Values(logps={}, reference=None, tokens={}, margin_E=vector([0.5, 0.0]),
                    scores={"chosen": vector([2.0, 1.0]), "rejected": vector([1.0, 1.0])})  # fmt: skip
    losses = build_loss(RewardModelConfig(margin_weight=2.0, center=0.1))(values)
    assert losses.losses_E.tolist() == pytest.approx([math.log(2) + 0.1 * 9, math.log(2) + 0.1 * 4])
    assert losses.metrics_E["rewards/accuracies"].tolist() == [1.0, 0.5]
    without = build_loss(RewardModelConfig(margin_weight=0.0))(values)
    assert without.losses_E.tolist() == pytest.approx([-math.log(sigma(1.0)), math.log(2)])


def test_what_they_ask_for() -> None:
    asked = {name: build_loss(kind()).wanted for name, kind in KINDS["loss"].items()
             if issubclass(kind, (UnpairedConfig, SFTConfig, RewardModelConfig))}  # fmt: skip
    assert [name for name, asks in asked.items() if asks.reference] == ["kto", "bco", "apo_zero_unpaired"]
    assert [name for name, asks in asked.items() if asks.mismatched] == ["kto"]
    assert [name for name, asks in asked.items() if asks.whole_batch] == ["bco"]
    assert [name for name, asks in asked.items() if asks.scores] == ["reward"]
    assert not build_loss(BCOConfig(shift=Shift.none)).wanted.whole_batch
    for name, kind in KINDS["loss"].items():
        if issubclass(kind, UnpairedConfig):
            assert kind.mismatches == asked[name].mismatched
