"""Defects of losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.training.algos.base import Sides, Values
from tests.helpers.faults.base import ALGOS, Fault, one
from tests.helpers.faults.plant import Change, Seeing

PAIRS, REWARDS = "algos.pairs:", "algos.log_ratios:implicit_rewards"
DPO, SUM = PAIRS + "dpo", PAIRS + "PairLoss."


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

FORMULAS = {
    "dpo": "DPO", "dpo_norm": "DPONorm", "ipo": "IPO", "apo_zero": "APOZero", "apo_down": "APODown", "simpo": "SimPO",
    "orpo": "ORPO", "cpo": "CPO", "bco_pair": "BCOPair", "hinge": "Hinge", "robust": "Robust", "aot": "AOT",
    "exo_pair": "EXOPair", "nca_pair": "NCAPair", "sppo_hard": "SPPOHard", "discopop": "DiscoPOP",
}  # fmt: skip
SMOOTHED = ("dpo", "dpo_norm", "cpo", "robust", "aot", "exo_pair")
OF_MARGINS = ("dpo", "dpo_norm", "simpo", "cpo", "hinge", "robust")


def times(factor: float) -> Change:
    """Multiply the loss that a formula returns, alone or with metrics."""

    def change(original: Any, cfg: Any, values: Values) -> Any:
        made = original(cfg, values)
        return factor * made if isinstance(made, Tensor) else replace(made, losses_E=factor * made.losses_E)

    return change


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
    for formula, name in FORMULAS.items():
        target = PAIRS + formula
        yield one(f"{name}: the sign of the loss", target, times(-1), "", ALGOS)
        yield one(f"{name}: twice the loss", target, times(2), "", ALGOS)
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
    made = original(self, values)
    shift = (
        self.beta * torch.cat([values.logps[side] - values.reference[side] for side in ("chosen", "rejected")]).mean()
    )
    return replace(made, losses_E=made.losses_E + (shift - shift.detach()) * 0.1)


def before_alone(original: Any, cfg: Any, values: Values) -> Any:
    return replace(original(cfg, values), losses_E=original(cfg, replace(values, held_out=True)).losses_E)


def of_negated_odds(original: Any, *args: Any) -> Any:
    made = original(*args)
    return replace(made, metrics_E={name: -each for name, each in made.metrics_E.items()})


def with_sft_weight(other: Callable[[float], float]) -> Change:
    def change(original: Any, self: Any, values: Values) -> Any:
        return original(replace(self, cfg=replace(self.cfg, sft_weight=other(self.cfg.sft_weight))), values)

    return change


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
    one("label smoothing with the wrong sign", "algos.log_ratios:logistic",
        lambda original, margin_P, share=0.0: original(margin_P, -share), "", ALGOS),
    one("sums where means per token are meant", "algos.log_ratios:per_token",
        lambda _original, values: values, "", ALGOS),
    one("IPO per token only", PAIRS + "ipo",
        with_other(normalize=lambda normalize: type(normalize)("token")), "", ALGOS),
    one("SimPO's margin has the wrong sign", PAIRS + "simpo",
        with_other(gamma=lambda gamma: -gamma), "", ALGOS),
    one("DiscoPOP's temperature is forgotten", PAIRS + "discopop", with_other(tau=lambda _tau: 1.0),
        "", ALGOS),
    one("1 - p without its last digits", PAIRS + "log_odds",
        Seeing({"torch.expm1": lambda _function: lambda logp_P: torch.exp(logp_P) - 1}), "", ALGOS),
    one("the sign of the odds that are logged", PAIRS + "orpo", of_negated_odds, "", ALGOS),
    one("the shift is of the batches before alone", PAIRS + "bco_pair", before_alone, "", ALGOS),
    one("the shift forgets the batches before", PAIRS + "bco_pair",
        with_values(carried=lambda _values: {}), "", ALGOS),
    one("the gradient passes through the shift", PAIRS + "bco_pair", through_the_shift, "", ALGOS),
    one("the gradient passes through the weights of WPO", SUM + "__call__", learning_weights, "",
        ALGOS),
    one("the shift learns of what is held out", PAIRS + "bco_pair",
        with_values(held_out=lambda _values: False), "", ALGOS),
    one("margins are not sorted", PAIRS + "of_the_same_rank",
        lambda _original, values_P, _places_P: values_P, "", ALGOS),
    one("equal values in any order", PAIRS + "of_the_same_rank",
        lambda original, values_P, places_P: original(values_P, places_P.flip(0)).flip(0), "", ALGOS),
    one("the margins of AOT on unpaired answers", PAIRS + "aot_unpaired", of_exchanged_answers, "",
        ALGOS),
    one("the weight of the likelihood is forgotten", SUM + "__call__",
        with_sft_weight(lambda weight: 1.0 if weight else 0.0), "", ALGOS),
    one("the sign of the likelihood", SUM + "__call__", with_sft_weight(lambda weight: -weight), "", ALGOS),
    one("all terms have the same weight", SUM + "terms",
        lambda original, self: [replace(term, weight=1.0) for term in original(self)], "", ALGOS),
    one("a reference that is not asked for", PAIRS + "shown", lambda _original, values, _formula: values,
        "", ALGOS),
    one("the square root of the on-policy weight", PAIRS + "on_policy_weight",
        lambda original, values: original(values).sqrt(), "", ALGOS),
    one("rewards without beta", REWARDS, lambda original, values, _beta: original(values, 1.0), "", ALGOS),
    one("a tie counts as lost", "algos.log_ratios:accuracies",
        lambda original, *args: torch.where((right := original(*args)) == 0.5, 0.0, right), "", ALGOS),
    one("the margin of the logged rewards", REWARDS,
        lambda original, *args: (right := original(*args))
        | {"rewards/margins": right["rewards/chosen"] + right["rewards/rejected"]}, "", ALGOS),
    one("beta is not handed to the loss", SUM + "terms",
        lambda original, loss: [replace(each, cfg=replace(each.cfg, beta=2 * each.cfg.beta))
                                for each in original(loss)],
        "", ALGOS),
)  # fmt: skip
