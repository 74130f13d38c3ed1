"""The algorithms of reinforcement learning against their papers' formulas, written as plain loops."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.schema.losses import KLEstimator, KLPlace, Normalize
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTerms, PolicyTokens
from tests.helpers.policy_losses import (
    EXACT,
    GROUPED,
    LOSSES,
    Case,
    answers_of,
    built,
    close,
    configured,
    plain_gradient,
    plain_logged,
    plain_loss,
    tensor,
    tokens_of,
)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0},
    {"kl_in": KLPlace.reward, "beta": 0.3, "kl": KLEstimator.k1},
    {"kl_in": KLPlace.reward, "beta": 0.3, "kl": KLEstimator.k2, "normalize": Normalize.sequence},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k1, "normalize": Normalize.fixed},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k2, "normalize": Normalize.token},
    {"kl_in": KLPlace.loss, "beta": 0.3, "kl": KLEstimator.k3, "whiten": True},
    {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3, "whiten": False},
    {"entropy": 0.02, "clip_low": 0.1, "clip_high": 0.1, "cap": 1.1},
]
OF_PPO: list[dict[str, Any]] = [{"value_clip": None}, {"gamma": 0.9, "lam": 0.7}, {"lam": 0.0}, {"lam": 1.0}]
VARIED = [*itertools.product(LOSSES, VARIANTS), *(("ppo", variant) for variant in OF_PPO)]


TERMS = {"loss/kl": {"beta": 0.0}, "loss/entropy": {"entropy": 0.0}, "loss/value_avg": {"value_coef": 0.0}}


@pytest.mark.parametrize(
    ("name", "variant"), VARIED, ids=lambda each: each if isinstance(each, str) else "-".join(each) or "defaults"
)
def test_loss_and_gradient_are_the_papers(name: str, variant: dict[str, Any]) -> None:
    changes = dict(variant)
    cap = changes.pop("cap", None)
    cfg = configured(name, **changes)
    loss: PolicyLoss = built(cfg, cap)
    for seed in range(3):
        case, kl_coef = Case(seed=seed), 1.7 * cfg.beta  # a controller has moved it
        tokens = tokens_of(case, cfg, loss, kl_coef)
        terms = loss(tokens, kl_coef)
        terms.loss.backward()

        def wanted(case: Case = case, kl_coef: float = kl_coef) -> Any:
            return plain_loss(case, cfg, kl_coef, cap)

        close(float(terms.loss.detach()), wanted().real)
        close(answers_of(tokens, tokens.logps_n.grad), plain_gradient(case, "logps", wanted))
        if loss.wanted.values is not None:
            assert tokens.values_n is not None
            close(answers_of(tokens, tokens.values_n.grad), plain_gradient(case, "values", wanted))
        if loss.wanted.entropy_gradient:
            close(answers_of(tokens, tokens.entropy_n.grad), plain_gradient(case, "entropy", wanted))
        parts = {key: float(part) for key, part in (terms.weighted | terms.replicated).items()}
        if name == "ppo":
            parts["loss/value_avg"] *= cfg.value_coef
        close(float(terms.loss.detach()), sum(parts.values()))
        for key, change in TERMS.items():  # each is what the loss lacks without it
            if key in parts:
                lesser = plain_loss(case, dataclasses.replace(cfg, **change), kl_coef, cap).real
                assert parts[key] == pytest.approx(wanted().real - lesser, rel=1e-9), key


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_logged_by_token(name: str) -> None:
    cfg, case = configured(name, clip_low=0.1, clip_high=0.2, dual_clip=1.25, beta=0.1), Case(seed=3)
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.1)
    terms = loss(tokens, 0.1)
    wanted = plain_logged(case, cfg, 0.1)
    for key, values_n in terms.means_n.items():
        assert not values_n.requires_grad
        close(values_n[tokens.trained_n > 0].tolist(), wanted[key])
    for key in terms.means_n.keys() & {"policy/clipfrac_avg", "val/clipfrac_avg"}:
        assert 0 < sum(wanted[key]) < len(wanted[key]), "both branches should be there"
    close(float(terms.peaks_n["val/ratio_max"][tokens.trained_n > 0].max()), max(wanted["val/ratio"]))


# ---- what does not move: the ring, the rounding ---------------------------------------------------------------------


def over_two_ranks(loss: PolicyLoss, tokens: PolicyTokens, kl_coef: float) -> tuple[list[PolicyTerms], Tensor]:
    """Give every other token to one rank and the rest to the other.

    A first pass records the other rank's sums. The backward of the sum over the ring is the identity.
    """
    sent: list[list[Tensor]] = [[], []]

    def part(rank: int, by_sequence: Callable[[Tensor], Tensor]) -> PolicyTokens:
        values = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
        return PolicyTokens(
            **{key: each[rank::2] if key.endswith("_n") and each is not None else each for key, each in values.items()}
            | {"by_sequence": by_sequence}
        )

    def own(rank: int, values_n: Tensor) -> Tensor:
        sums = torch.zeros(len(tokens.weight_S), dtype=torch.float64)
        return sums.index_add(0, tokens.sequence_n[rank::2], values_n.double())

    def record(rank: int, values_n: Tensor) -> Tensor:
        sent[rank].append(own(rank, values_n).detach())
        return sent[rank][-1]

    for rank in (0, 1):
        loss(part(rank, lambda values_n, rank=rank: record(rank, values_n)), kl_coef)
    results = []
    for rank in (0, 1):
        others = iter(sent[1 - rank])
        terms = loss(part(rank, lambda values_n, rank=rank, o=others: own(rank, values_n) + next(o)), kl_coef)
        terms.loss.backward()
        results.append(terms)
    assert tokens.logps_n.grad is not None
    return results, tokens.logps_n.grad


@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_are_one(name: str) -> None:
    cfg, case = configured(name, beta=0.1, entropy=0.01, clip_low=0.1, clip_high=0.1), Case(seed=5)
    loss = built(cfg, importance_cap=1.5)
    alone_tokens, tokens = tokens_of(case, cfg, loss, 0.1), tokens_of(case, cfg, loss, 0.1)
    alone = loss(alone_tokens, 0.1)
    alone.loss.backward()
    ranks, gradient = over_two_ranks(loss, tokens, 0.1)
    for key, part in alone.weighted.items():
        close(sum(float(each.weighted[key]) for each in ranks), float(part))
    for key, part in alone.replicated.items():
        assert [float(each.replicated[key]) for each in ranks] == pytest.approx([float(part)] * 2, rel=EXACT)
    for key, values_n in (alone.means_n | alone.peaks_n).items():
        for rank, each in enumerate(ranks):
            close((each.means_n | each.peaks_n)[key].tolist(), values_n[rank::2].tolist())
    assert alone_tokens.logps_n.grad is not None
    close(gradient.tolist(), alone_tokens.logps_n.grad.tolist())


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_without_a_token_has_its_graph(name: str) -> None:
    cfg = configured(name, entropy=0.01)
    loss = built(cfg)
    tokens = tokens_of(Case(lengths=(0, 0), counts=(True, False), groups=(0, 0)), cfg, loss, cfg.beta)
    nothing: dict[str, Any] = {
        field.name: getattr(tokens, field.name)[:0]
        for field in dataclasses.fields(tokens)
        if field.name.endswith("_n") and getattr(tokens, field.name) is not None
    }
    none_S = torch.zeros(2, dtype=torch.float64)
    nothing["by_sequence"] = lambda values_n: none_S + values_n.sum()
    for some in (tokens, dataclasses.replace(tokens, **nothing)):
        terms = loss(some, cfg.beta)
        assert float(terms.loss.detach()) == 0.0
        terms.loss.backward()
        assert tokens.logps_n.grad is not None
        assert tokens.logps_n.grad.eq(0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_rounding_about_one_clips_nothing(name: str) -> None:
    cfg = configured(name, dual_clip=3.0)
    loss = built(cfg)
    tokens = tokens_of(Case(apart=1e-7), cfg, loss, cfg.beta)
    values = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
    coarse = {key: each.detach().float() for key, each in values.items() if key.endswith("_n") and each is not None}
    for some in (tokens, dataclasses.replace(tokens, **coarse | {"sequence_n": tokens.sequence_n})):
        terms = loss(some, cfg.beta)
        for key in terms.means_n.keys() & {"policy/clipfrac_avg", "val/clipfrac_avg"}:
            assert terms.means_n[key].eq(0).all()


def test_the_four_corners_of_the_clipped_ratio() -> None:
    ratio, advantage = tensor([0.5, 1.5, 0.5, 1.5, 4.0]), tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    losses, clipped = built(configured("ppo", dual_clip=3.0)).surrogate(ratio, advantage)
    assert losses.tolist() == [-0.5, -1.2, 0.8, 1.5, 3.0]
    assert clipped.tolist() == [0, 1, 1, 0, 1]


def test_an_advantage_of_zero_is_a_tie_and_not_clipped() -> None:
    losses, clipped = built(configured("ppo", dual_clip=3.0)).surrogate(tensor([0.1, 1.0, 9.0]), torch.zeros(3))
    assert losses.eq(0).all()
    assert clipped.eq(0).all()


# ---- what an answer earns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_equal_scores_and_a_group_of_one_earn_exactly_nothing(name: str) -> None:
    scores = [0.1] * 3 + [7.0]
    outcomes = Outcomes(tensor(scores), torch.zeros(4).double(), torch.tensor([0, 0, 0, 1]))
    wanted = [0.0] * 4 if name in GROUPED else scores
    assert built(configured(name)).credit(outcomes, 0.05).tolist() == wanted
    assert float(tensor([0.1] * 3).mean()) != 0.1  # a plain mean would leave rounding


def test_groups_need_not_lie_together() -> None:
    outcomes = Outcomes(tensor([1.0, 10.0, 3.0, 30.0]), torch.zeros(4).double(), torch.tensor([5, 2, 5, 2]))
    assert built(configured("rloo")).credit(outcomes, 0.0).tolist() == [-2.0, -20.0, 2.0, 20.0]


def test_what_an_algorithm_needs() -> None:
    for name in LOSSES:
        for beta, entropy in ((0.0, 0.0), (0.1, 0.01)):
            loss = built(configured(name, beta=beta, entropy=entropy))
            assert loss.wanted.reference is (beta > 0)
            assert loss.wanted.entropy_gradient is (entropy > 0)
            assert (loss.wanted.values is not None) is (name == "ppo")
