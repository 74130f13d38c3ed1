"""Defects of losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.training.algos.base import Sides, Values
from tests.helpers.faults.base import (
    ALGOS,
    Fault,
    one,
)
from tests.helpers.faults.plant import Change, Seeing

DPO, REWARDS = "algos.dpo:DPO.losses", "algos.log_ratios:implicit_rewards"


def less_its_mean(original: Any, self: Any, values: Values) -> Tensor:
    """Measure each margin from the mean of those beside it: a statistic of the micro-batch."""
    chosen_P, rejected_P = values.logps["chosen"], values.logps["rejected"]
    mean = (chosen_P - rejected_P).mean() if len(chosen_P) else 0.0
    return original(self, replace(values, logps={**values.logps, "chosen": chosen_P - mean}))


CALLS = itertools.count()


def of_some_only(original: Any, values: Values, *args: Any) -> Any:
    """Leave a value out of every second micro-batch."""
    rewards = original(values, *args)
    if len(values.logps["chosen"]) < 8 and next(CALLS) % 2:
        del rewards["rewards/margins"]
    return rewards


# What surrounds a formula: `verify` has the same formula, and sees the whole train batch at once.
ALGOS_FAULTS = (
    one("a statistic of the micro-batch", DPO, less_its_mean, "loss", ALGOS),
    one("divided by its micro-batch", DPO,
        lambda original, self, values: (right := original(self, values)) / max(1, len(right)), "loss", ALGOS),
    one("a slope inside the micro-batch", DPO,
        lambda original, self, values: (right := original(self, values)) + (right.sum() - right.sum().detach()),
        "loss", ALGOS),
    one("rewards less their micro-batch's mean", REWARDS,
        lambda original, *args: (right := original(*args))
        | {"rewards/chosen": right["rewards/chosen"] - right["rewards/chosen"].mean()}, "metrics", ALGOS, step=2),
    one("a value of some micro-batches only", REWARDS, of_some_only, "metrics", ALGOS),
)  # fmt: skip

# ---- wrong formulas, which tests/training/algos/test_formulas.py finds by hand arithmetic and by the textbook ----

FORMULAS = (
    "dpo:DPO", "dpo_norm:DPONorm", "ipo:IPO", "apo:APOZero", "apo:APODown", "simpo:SimPO", "orpo:ORPO", "cpo:CPO",
    "bco_pair:BCOPair", "hinge:Hinge", "robust:Robust", "aot:AOT", "exo_pair:EXOPair", "nca_pair:NCAPair",
    "sppo_hard:SPPOHard", "discopop:DiscoPOP",
)  # fmt: skip
SMOOTHED = ("dpo:DPO", "dpo_norm:DPONorm", "cpo:CPO", "robust:Robust", "aot:AOT", "exo_pair:EXOPair")
OF_MARGINS = ("dpo:DPO", "dpo_norm:DPONorm", "simpo:SimPO", "cpo:CPO", "hinge:Hinge", "robust:Robust")


def with_other(**keys: Callable[[Any], Any]) -> Change:
    """Let a formula compute with other values of its keys."""

    def change(original: Any, self: Any, values: Values) -> Tensor:
        return original(replace(self, **{key: other(getattr(self, key)) for key, other in keys.items()}), values)

    return change


def exchanged(sides: Sides | None) -> Sides | None:
    return sides and {"chosen": sides["rejected"], "rejected": sides["chosen"]}


def of_exchanged_answers(original: Any, self: Any, values: Values) -> Tensor:
    other = {name: exchanged(getattr(values, name)) for name in ("logps", "reference", "tokens")}
    return original(self, replace(values, **other))


def in_formulas() -> Iterator[Fault]:
    """A sign and a factor in each formula."""
    for formula in FORMULAS:
        name, target = formula.partition(":")[2], f"algos.{formula}.losses"
        yield one(f"{name}: the sign of the loss", target, lambda original, *args: -original(*args), "", ALGOS)
        yield one(f"{name}: twice the loss", target, lambda original, *args: 2 * original(*args), "", ALGOS)
        yield one(f"{name}: the sign of the margin", target, of_exchanged_answers, "", ALGOS)
        yield one(f"{name}: a factor of beta", target, with_other(beta=lambda beta: 1.01 * beta), "", ALGOS)
        if formula in SMOOTHED:
            half = with_other(label_smoothing=lambda share: share / 2)
            yield one(f"{name}: half the label smoothing", target, half, "", ALGOS)
        if formula in OF_MARGINS:
            turned = with_other(margin_weight=lambda weight: -weight)
            yield one(f"{name}: the sign of the rows' margin", target, turned, "", ALGOS)


def with_values(**other: Callable[[Values], Any]) -> Change:
    """Let a method of a formula be given other values."""

    def change(original: Any, self: Any, values: Values) -> Any:
        return original(self, replace(values, **{name: other[name](values) for name in other}))

    return change


def added(logps: Sides) -> Sides:
    return {**logps, "rejected": -logps["rejected"]}


def through_the_shift(original: Any, self: Any, values: Values) -> Any:
    """Let the gradient pass through the mean of the rewards."""
    shift = (
        self.beta * torch.cat([values.logps[side] - values.reference[side] for side in ("chosen", "rejected")]).mean()
    )
    losses_E = original(self, values)
    return losses_E + (shift - shift.detach()) * 0.1


def learning_weights(original: Any, self: Any, values: Values) -> Any:
    """Let the gradient pass through the weights of the pairs."""

    def kept(_of: Any) -> Callable[..., Any]:
        def weight(values: Values) -> Any:
            means = [(values.logps[side] - values.of_tokens["likelihoods"][side]) / values.tokens[side]
                     for side in ("chosen", "rejected")]  # fmt: skip
            return torch.exp(means[0] + means[1])

        return weight

    losses = Seeing({"on_policy_weight": kept}).of(original, lambda: None)(self, values)
    return replace(losses, metrics_E={name: each.detach() for name, each in losses.metrics_E.items()})


FORMULA_FAULTS = (
    *in_formulas(),
    one("the rejected answer is added", DPO,
        with_values(logps=lambda values: added(values.logps),
                    reference=lambda values: values.reference and added(values.reference)), "", ALGOS),
    one("no reference in the margin", DPO, with_values(reference=lambda _values: None), "", ALGOS),
    one("label smoothing with the wrong sign", "algos.logistic:logistic",
        lambda original, margin_P, share=0.0: original(margin_P, -share), "", ALGOS),
    one("sums where means per token are meant", "algos.log_ratios:per_token",
        lambda _original, values: values, "", ALGOS),
    one("IPO per token only", "algos.ipo:IPO.losses",
        with_other(normalize=lambda normalize: type(normalize)("token")), "", ALGOS),
    one("SimPO's margin has the wrong sign", "algos.simpo:SimPO.losses",
        with_other(gamma=lambda gamma: -gamma), "", ALGOS),
    one("DiscoPOP's temperature is forgotten", "algos.discopop:DiscoPOP.losses", with_other(tau=lambda _tau: 1.0),
        "", ALGOS),
    one("1 - p without its last digits", "algos.orpo:log_odds",
        Seeing({"torch.expm1": lambda _function: lambda logp_P: torch.exp(logp_P) - 1}), "", ALGOS),
    one("the sign of the odds that are logged", "algos.orpo:ORPO.logged",
        lambda original, *args: {name: -each for name, each in original(*args).items()}, "", ALGOS),
    one("the shift is of the batches before alone", "algos.bco_pair:BCOPair.losses",
        with_values(held_out=lambda _values: True), "", ALGOS),
    one("the shift forgets the batches before", "algos.bco_pair:BCOPair.carried",
        with_values(carried=lambda _values: {}), "", ALGOS),
    one("the gradient passes through the shift", "algos.bco_pair:BCOPair.losses", through_the_shift, "", ALGOS),
    one("the gradient passes through the weights of WPO", "algos.preference:Preference.__call__", learning_weights, "",
        ALGOS),
    one("the shift learns of what is held out", "algos.bco_pair:BCOPair.carried",
        with_values(held_out=lambda _values: False), "", ALGOS),
    one("margins are not sorted", "algos.aot:of_the_same_rank",
        lambda _original, values_P, _places_P: values_P, "", ALGOS),
    one("equal values in any order", "algos.aot:of_the_same_rank",
        lambda original, values_P, places_P: original(values_P, places_P.flip(0)).flip(0), "", ALGOS),
    one("the margins of AOT on unpaired answers", "algos.aot:AOTUnpaired.compared",
        lambda original, *args: original(*args)[::-1], "", ALGOS),
    one("the weight of the likelihood is forgotten", "algos.preference:Preference.__call__",
        lambda original, self, values: original(replace(self, sft_weight=1.0 if self.sft_weight else 0.0), values),
        "", ALGOS),
    one("the sign of the likelihood", "algos.preference:Preference.__call__",
        lambda original, self, values: original(replace(self, sft_weight=-self.sft_weight), values), "", ALGOS),
    one("all terms have the same weight", "algos.preference:Preference.__call__",
        lambda original, self, values: original(
            replace(self, terms=[replace(term, weight=1.0) for term in self.terms]), values), "", ALGOS),
    one("a reference that is not asked for", "algos.preference:shown", lambda _original, values, _formula: values,
        "", ALGOS),
    one("the square root of the on-policy weight", "algos.preference:on_policy_weight",
        lambda original, values: original(values).sqrt(), "", ALGOS),
    one("rewards without beta", REWARDS, lambda original, values, _beta: original(values, 1.0), "", ALGOS),
    one("a tie counts as lost", "algos.log_ratios:accuracies",
        lambda original, *args: torch.where((right := original(*args)) == 0.5, 0.0, right), "", ALGOS),
    one("the margin of the logged rewards", REWARDS,
        lambda original, *args: (right := original(*args))
        | {"rewards/margins": right["rewards/chosen"] + right["rewards/rejected"]}, "", ALGOS),
    one("beta is not handed to the loss", "algos.build:build_formula",
        lambda original, cfg, *args: original(replace(cfg, beta=2 * cfg.beta), *args), "", ALGOS),
)  # fmt: skip
