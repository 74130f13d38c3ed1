"""Defects of losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlexp.training.algos.base import PairLogps, PairLosses
from tests.helpers.faults.base import (
    ALGOS,
    one,
)
from tests.helpers.faults.plant import Change


def other_losses(losses: Callable[..., Any]) -> Change:
    """Take the losses from `losses(original, self, policy, reference)`, and leave the values per pair right."""

    def change(original: Any, self: Any, policy: PairLogps, reference: PairLogps) -> PairLosses:
        return replace(original(self, policy, reference), losses_P=losses(original, self, policy, reference))

    return change


def wrong_sign(original: Any, self: Any, *logps: PairLogps) -> Any:
    """Return (1 − s) × the losses of the labels − s × those of the swapped labels."""
    right, other = (original(replace(self, label_smoothing=label), *logps).losses_P for label in (0.0, 1.0))
    return (1 - self.label_smoothing) * right - self.label_smoothing * other


def added(logps: PairLogps) -> PairLogps:
    return replace(logps, rejected_P=-logps.rejected_P)


def no_chosen(logps: PairLogps) -> PairLogps:
    return replace(logps, chosen_P=torch.zeros_like(logps.chosen_P))


DPO, REWARDS = "algos.dpo:DPO.__call__", "algos.implicit_rewards:"


def less_its_mean(original: Any, self: Any, *logps: PairLogps) -> Any:
    """Measure each margin from the mean of those beside it: a statistic of the micro-batch."""
    policy, reference = logps
    mean = (policy.chosen_P - policy.rejected_P).mean() if len(policy.chosen_P) else 0.0
    return original(self, replace(policy, chosen_P=policy.chosen_P - mean), reference).losses_P


CALLS = itertools.count()


def of_some_only(original: Any, policy: PairLogps, *args: Any) -> Any:
    """Leave a value out of every second micro-batch."""
    values = original(policy, *args)
    if len(policy.chosen_P) < 8 and next(CALLS) % 2:
        del values["rewards/margins"]
    return values


# What surrounds a formula: `verify` has the same formula, and sees the whole train batch at once.
ALGOS_FAULTS = (
    one("a statistic of the micro-batch", DPO, other_losses(less_its_mean), "loss", ALGOS),
    one("divided by its micro-batch", DPO,
        other_losses(lambda original, self, *logps: (right := original(self, *logps).losses_P) / max(1, len(right))),
        "loss", ALGOS),
    one("a slope inside the micro-batch", DPO,
        other_losses(lambda original, self, *logps: (right := original(self, *logps).losses_P) + (
            right.sum() - right.sum().detach())), "loss", ALGOS),
    one("rewards less their micro-batch's mean", REWARDS + "implicit_rewards",
        lambda original, *args: (right := original(*args))
        | {"rewards/chosen": right["rewards/chosen"] - right["rewards/chosen"].mean()}, "metrics", ALGOS, step=2),
    one("a value of some micro-batches only", REWARDS + "implicit_rewards", of_some_only, "metrics", ALGOS),
)  # fmt: skip

# Wrong formulas, which tests/training/algos/test_formulas.py finds by hand arithmetic and by TRL.
FORMULA_FAULTS = (
    one("beta is forgotten", DPO,
        other_losses(lambda original, self, *logps: original(replace(self, beta=1.0), *logps).losses_P), "", ALGOS),
    one("label smoothing with the wrong sign", DPO, other_losses(wrong_sign), "", ALGOS),
    one("label smoothing on the right label", DPO,
        other_losses(lambda original, self, *logps: original(replace(self, label_smoothing=0.0), *logps).losses_P),
        "", ALGOS),
    one("the rejected answer is added", DPO,
        other_losses(lambda original, self, *logps: original(self, *map(added, logps)).losses_P), "", ALGOS),
    one("no reference in the margin", DPO,
        other_losses(lambda original, self, policy, start: original(self, policy, no_chosen(start)).losses_P),
        "", ALGOS),
    one("rewards without beta", REWARDS + "implicit_rewards",
        lambda original, policy, start, beta: original(policy, start, beta)
        | {"rewards/chosen": policy.chosen_P.detach() - start.chosen_P.detach()}, "", ALGOS),
    one("a tie counts as lost", REWARDS + "accuracies",
        lambda original, *args: torch.where((right := original(*args)) == 0.5, 0.0, right), "", ALGOS),
    one("the margin of the logged rewards", REWARDS + "implicit_rewards",
        lambda original, *args: (right := original(*args))
        | {"rewards/margins": right["rewards/chosen"] + right["rewards/rejected"]}, "", ALGOS),
    one("beta is not handed to the loss", "algos.build:build_loss",
        lambda original, cfg: original(replace(cfg, beta=2 * cfg.beta)), "", ALGOS),
)  # fmt: skip
