"""Metrics by hand where ranks and replicas have unequal shares, so that a mean of ranks is another number. The formulas
are those of docs/losses.md, docs/reinforcement.md, docs/sharing.md, docs/layouts.md and docs/dashboards.md."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS
from rlexp.training.algos.base import Sides, Values
from rlexp.training.algos.build import build_loss, build_policy_loss
from rlexp.training.algos.policy_loss import PolicyTerms
from rlexp.training.dealer.forest import Share
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.metrics.meter import SHARDED, Meter
from rlexp.training.ring.kernels import Plain
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout.rewards.weighted import Judged
from rlexp.training.train import rollout_task
from rlexp.training.train.examples import Examples
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.train.rows_task import note as note_losses
from rlexp.training.train.rows_task import tail_weights
from rlexp.training.train.step import note_balance, note_sharing, note_tokens, row_of
from rlexp.training.types import CreditedSample, Example, Sample
from rlexp.training.world.groups import World
from tests.helpers.played_ranks import Played


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_a_row_is_of_all_ranks() -> None:
    """One replica has a pair with a common prompt of 20 tokens, the other one a short pair. The rings have contiguous
    halves: of the 570 and 31 pairs of a query and a key, the second ranks see 342 and 22."""
    layout, seconds, peaks = get_layout("contiguous"), (1.5, 0.5, 2.0, 1.0), (7, 9, 8, 3)
    pairs = [(np.arange(20), np.arange(30, 39), np.arange(50, 55)), (np.arange(2), np.arange(4), np.arange(50, 52))]

    def row(world: World) -> dict[str, float]:
        meter, (prompt, *answers) = Meter(world, torch.device("cpu")), pairs[world.replica]
        pack = pack_sequences([(prompt, answer) for answer in answers], 2, share=Share())
        for note in (note_tokens, note_sharing, note_balance):
            note(meter, shard_pack(pack, world.ring, layout, Plain(), 64))
        for name in ("peak", "backward_tensors_peak", "ring_tokens", "ring_bytes"):
            meter.add_max(name, peaks[world.rank] if name == "peak" else 10 - peaks[world.rank])
        meter.add_max("step_seconds", seconds[world.rank])
        meter.add_total("operations", 0.0, SHARDED)
        run = SimpleNamespace(phases=SimpleNamespace(report=lambda _: None), world=world, peak=None)
        step: Any = SimpleNamespace(batch=SimpleNamespace(step=6), micro_batches=[(0,), ()])
        task: Any = SimpleNamespace(run=run, steps_per_epoch=4)
        return row_of(task, step, meter, {})

    found = Played(4, 2).alike(row)
    wanted = {
        "train/tokens": 29 + 25 + 6 + 4, "train/shared_tokens": 19, "train/ring_balance": (342 + 22) / (601 / 2),
        "train/step_seconds": 2.0, "train/tokens_per_second": 64 / 2.0, "train/epoch": 1.5, "train/grad_acc": 2,
        "memory/peak_bytes": 9, "memory/peak_rank": 1, "memory/backward_tensors_peak_bytes": 7,
        "memory/backward_tensors_peak_rank": 3,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_difference_has_both_of_its_means() -> None:
    def fill(_world: World, meter: Meter) -> None:
        meter.add_mean("one", 3.0, 2, SHARDED)
        meter.add_mean("none", 0.0, 0, SHARDED)
        meter.add_difference("apart", "one", "none")

    assert Played(2, 1).metered(fill) == {"one": 1.5}


# ---- what a loss says of its examples ----

LOGPS: Sides = {"chosen": vector([-10, -8, -3, -12]), "rejected": vector([-12, -9, -9, -4])}
REFERENCE: Sides = {"chosen": vector([-11, -6, -4, -9]), "rejected": vector([-10, -9, -8, -7])}
TOKENS: Sides = {"chosen": vector([4, 2, 1, 8]), "rejected": vector([3, 3, 5, 2])}
LIKELIHOODS: Sides = {"chosen": vector([-9, -7, -3, -10]), "rejected": vector([-11, -9, -8, -4])}
PAIRS = Values(LOGPS, REFERENCE, TOKENS, of_tokens={"likelihoods": LIKELIHOODS}, mean_tokens=15 / 4)
MARGINS = [1.5, -1.0, 1.0, -3.0]  # beta is 0.5
ODDS = [math.log(math.expm1(12 / 3) / math.expm1(10 / 4)), math.log(math.expm1(9 / 3) / math.expm1(8 / 2)),
        math.log(math.expm1(9 / 5) / math.expm1(3 / 1)), math.log(math.expm1(4 / 2) / math.expm1(12 / 8))]  # fmt: skip
SINGLE = Values({"answer": vector([-7, -11, -5, -8])}, {"answer": vector([-9] * 4)}, {"answer": vector([1] * 4)},
                label_E=vector([1, 1, 1, 0]), mismatched_B=vector([4, 1, 0, 1]), held_out=True)  # fmt: skip
TERMS = [{"loss": "dpo", "weight": 0.8}, {"loss": "hinge", "weight": 0.2}]
OF_LABELS = {"rewards/chosen": 2 / 3, "rewards/rejected": 0.5, "rewards/margins": 2 / 3 - 0.5, "logps/rejected": -8.0,
             "logps/chosen": -23 / 3, "rewards/accuracies": 3 / 4}  # fmt: skip
BY_HAND: dict[str, tuple[dict[str, Any], Values, dict[str, float]]] = {
    "dpo": ({"beta": 0.5, "wpo": True, "sft_weight": 0.3}, PAIRS, {
        "nll_loss": 33 / 15, "rewards/chosen": -1.5 / 4, "rewards/margins": mean(MARGINS), "logps/rejected": -34 / 4,
        "rewards/accuracies": 2 / 4, "wpo_weight": mean([*map(math.exp, (-1 / 4 - 1 / 3, -1 / 2, -1 / 5, -1 / 4))])}),
    "mpo": ({"beta": 0.5, "sft_weight": 0.0, "terms": TERMS}, PAIRS, {
        "loss/dpo": 0.8 * mean([math.log1p(math.exp(-margin)) for margin in MARGINS]), "loss/hinge": 0.2 * 6 / 4}),
    "orpo": ({}, PAIRS, {
        "log_odds_chosen": mean(ODDS), "log_odds_ratio": -mean([math.log1p(math.exp(-each)) for each in ODDS])}),
    "kto": ({"beta": 0.5}, SINGLE, OF_LABELS | {"kl": 1.5}),
    "bco": ({"beta": 0.5}, replace(SINGLE, carried={"bco/rewards": 0.75, "bco/answers": 9.0}), OF_LABELS | {
        "bco/shift": 0.75}),
    "reward": ({}, Values({}, None, {}, scores=LOGPS), {
        "rewards/chosen": -33 / 4, "rewards/rejected": -34 / 4, "rewards/margins": 1 / 4, "rewards/accuracies": 3 / 4}),
    "sft": ({}, Values({"answer": LOGPS["chosen"]}, None, {"answer": TOKENS["chosen"]}, mean_tokens=15 / 4, of_tokens={
        "hits": {"answer": vector([3, 0, 1, 2])}, "entropies": {"answer": vector([5, 4, 2, 7])}}), {
        "loss": 33 / 15, "mean_token_accuracy": 6 / 15, "entropy": 18 / 15}),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_metric_of_examples_is_of_all_replicas(name: str) -> None:
    """Three examples on one ring and one on the other."""
    keys, values, wanted = BY_HAND[name]
    losses = build_loss(KINDS["loss"][name](**keys))(values)

    def fill(world: World, meter: Meter) -> None:
        here = (slice(3), slice(3, 4))[world.replica]
        logps, metrics, weights = ({side: each_E[here] for side, each_E in group.items()}
                                   for group in (values.logps, losses.metrics_E, losses.weights_E))  # fmt: skip
        own = replace(losses, losses_E=losses.losses_E[here], metrics_E=metrics, weights_E=weights)
        note_losses(meter, replace(values, logps=logps), own)

    found = Played(4, 2).metered(fill)
    assert {each: found[each] for each in wanted} == pytest.approx(wanted, rel=1e-13)


def test_trained_tokens_beyond_the_shorter_answer_count_less() -> None:
    """They are those of docs/losses.md for `loss.ld_alpha`, by which `logps` are weighted."""
    chosen, rejected = np.arange(6), np.arange(3)
    mask: Any = np.array([True, False, True, True, True, True])
    pair = Example(0, np.arange(2), (chosen, rejected), (mask, None), "row 1")
    assert [part.tolist() for part in tail_weights(pair, 0.3)] == [[1.0, 1.0, 1.0, 0.3, 0.3], [1.0, 1.0, 1.0]]


# ---- what a rollout says of its samples ----

PLACES = ((0, 1, 2, 5), (3, 4))  # of the samples of two ranks: three prompts, two answers each
SCORES = [1.0, 3.0, 2.0, 2.0, 0.0, 4.5]
OLD = [[-1.0, -2.0], [-3.0, -1.5, -0.5], [-4.0], [-2.5, -0.5], [-1.0, -1.0, -2.0, -0.5], [-0.2]]
AWAY = [[0.1, -0.3], [0.5, 0.2, 0.1], [-0.4], [0.3, 0.3], [0.6, -0.2, 0.1, 0.4], [0.7]]  # from the reference
RETURNS = [[1.0, 2.0], [0.5, -1.0, 3.0], [0.0], [2.0, 2.5], [1.0, 1.0, 0.0, -2.0], [4.0]]
CRITIC = [[0.5, 1.0], [1.0, 0.0, 2.0], [0.5], [2.0, 1.0], [0.0, 1.0, 1.0, -1.0], [2.0]]


def drawn_of(place: int) -> Sample:
    old, unused = np.array(OLD[place]), cast(Any, None)
    return Sample(
        place=place, example=unused, number=0, answer=old, stopped=place not in (1, 4), text="", behaviour=old
    )


def judged(samples: Sequence[Sample], _: Any) -> list[Judged]:
    return [Judged(SCORES[each.place], {"brief": SCORES[each.place] / 2, "late": -each.place}) for each in samples]


def sample_of(place: int) -> CreditedSample:
    old, values, returns = (np.array(each[place]) for each in (OLD, CRITIC, RETURNS))
    (judgement,), known = judged([drawn_of(place)], None), {"reference": old - AWAY[place], "advantages": returns}
    return CreditedSample(**vars(drawn_of(place)), **vars(judgement), **known, counts=True, old=old, values=values,
                          returns=returns)  # fmt: skip


def variance(values: Sequence[float]) -> float:
    return mean([(each - mean(values)) ** 2 for each in values])


def test_a_rollout_s_values_are_of_the_samples_of_all_ranks() -> None:
    """Four on one rank, and two on the other. Held-out prompts have those that need no model."""
    cfg = compose_config(["launch.device=cpu", "loss=ppo", "loss.kl=k3", "reward.rule=length", "rollout.n_samples=2",
                          "rollout.batch_size=3", "train.batch_size=6"])  # fmt: skip
    rewards = SimpleNamespace(weights={"brief": 2.0, "late": 0.1}, judged=judged)
    played = Played(2, 1)

    def values(world: World) -> tuple[dict[str, float], dict[str, float]]:
        mine = [*map(sample_of, PLACES[world.rank])]
        source = SimpleNamespace(draw=lambda *_: [*map(drawn_of, PLACES[world.rank])], staleness=1)
        host = SimpleNamespace(sum=lambda each: each.copy_(played.gathered(each, world).sum(0)), meet=lambda: None)
        run: Any = SimpleNamespace(cfg=cfg, world=world, phases=lambda _: contextlib.nullcontext())
        parts: Any = (source, rewards, SimpleNamespace(score_rewards=lambda _: {}), host)
        kind, unused = cast(Any, cfg.loss), cast(Any, None)
        loss = build_policy_loss(kind, None)
        rollouts = Rollouts(run, kind, loss, Examples((), (unused,) * 6), unused, *parts)
        rollouts.own_samples, rollouts.kl_coef = mine, 0.3
        return rollouts._values(rollouts._table(mine, 6, scored=True)), rollouts.evaluate()

    found, held_out = played.alike(values)
    charged = -0.3 * mean([sum(math.exp(-d) - 1 + d for d in away) for away in AWAY])
    returns, predicted = [*chain(*RETURNS)], [*chain(*CRITIC)]
    errors = [one - other for one, other in zip(returns, predicted, strict=True)]
    drawn = {"objective/scores": 12.5 / 6, "response/length": 13 / 6, "response/stopped": 4 / 6,
             "reward/brief": 12.5 / 12, "reward/late": -15 / 6}  # fmt: skip
    assert held_out == pytest.approx(drawn, rel=1e-14)
    wanted = drawn | {
        "objective/scores_std": math.sqrt(variance(SCORES)), "objective/kl": sum(map(sum, AWAY)) / 6,
        "objective/entropy": -sum(map(sum, OLD)) / 6, "objective/kl_coef": 0.3, "objective/non_score_reward": charged,
        "objective/rlhf_reward": 12.5 / 6 + charged, "response/length_max": 4, "rollout/staleness": 1,
        "rollout/without_signal": 2 / 6, "val/explained_variance": 1 - variance(errors) / variance(returns),
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-13)


def test_a_step_s_terms_are_of_the_trained_tokens_of_all_ranks() -> None:
    """A ring with three and one of them, and another with two on one rank; a sequence's term is whole on each rank of
    its ring, and counts once. An untrained token may have the largest ratio."""
    ratios = ([1.0, 0.5, 0.75, 9.0], [3.0], [2.0, 1.5], [])
    trained = ([1.0, 1.0, 1.0, 0.0], [1.0], [1.0, 1.0], [])

    def fill(world: World, meter: Meter) -> None:
        rank, whole, ratio_n = world.rank, vector((2.0, 0.5)[world.replica]), vector(ratios[world.rank])
        terms = PolicyTerms(
            whole + rank, {"part": vector(rank)}, {"whole": whole}, {"mean": ratio_n}, {"peak": ratio_n}
        )
        tokens: Any = SimpleNamespace(trained_n=vector(trained[rank]))
        rollout_task.note(terms, tokens, meter)

    found = Played(4, 2).metered(fill)
    assert found == {"loss": 2.5 + 6, "part": 6.0, "whole": 2.5, "mean": 8.75 / 6, "peak": 3.0, "peak@rank": 1}


def test_seconds_are_the_slowest_rank_s_and_samples_those_of_all_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_task, "time", SimpleNamespace(monotonic=lambda: 20.0))
    taken = ({"rollout": 6.0, "score": 1.0, "sampling": 3.0, "waited": 0.5},
             {"rollout": 5.5, "score": 2.0, "sampling": 5.0, "waited": 0.0})  # fmt: skip

    def step_of(rank: int) -> Any:
        task = SimpleNamespace(rollouts=SimpleNamespace(number=2, size=12))
        return SimpleNamespace(made=SimpleNamespace(seconds=taken[rank], values={}), drawn_at=17.0 + rank, task=task)

    step = rollout_task.RolloutStep
    found = Played(2, 1).metered(lambda world, meter: step.measure(step_of(world.rank), meter))
    values = {f"train/{name}": value for name, value in found.items() if not name.endswith("@rank")}
    step.finish(step_of(0), values)
    assert values == {
        "train/time/train": 3.0, "train/time/rollout": 6.0, "train/time/score": 2.0, "train/time/sampling": 5.0,
        "train/time/sampling_fastest": 3.0, "train/time/waited": 0.5, "train/samples_per_second": 12 / 8,
        "train/episode": 36,
    }  # fmt: skip
