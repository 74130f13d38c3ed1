"""The losses over single answers: supervised training, and those over answers labelled good or bad (`UNPAIRED`).

Those compare an answer's reward, β·(log π − log π_ref), with a point of reference, through which no gradient passes.
Good answers should be above it, bad ones below. Shape letters: E examples, B of the train batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlexp.config.schema.losses import APOZeroUnpairedConfig, BCOConfig, KTOConfig, SFTConfig, Shift, UnpairedConfig
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import accuracies, log_ratio, logistic, shift_of
from rlexp.training.types import Wanted

MARGINS = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}


@dataclass(frozen=True)
class SFT:
    """−log π of each trained token, in the mean over those of the whole train batch."""

    cfg: SFTConfig
    wanted: ClassVar[Wanted] = Wanted(mean_tokens=True, entropies=True, hits=True)

    def __call__(self, values: Values) -> Losses:
        tokens_E = values.tokens["answer"]
        some_E = tokens_E.clamp(min=1)
        metrics_E = {
            "mean_token_accuracy": values.of_tokens["hits"]["answer"] / some_E,
            "entropy": values.of_tokens["entropies"]["answer"] / some_E,
        }
        weights_E = dict.fromkeys(metrics_E, tokens_E) | {"loss": tokens_E / values.mean_tokens}
        return Losses(-values.logps["answer"] / values.mean_tokens, metrics_E, weights_E)


@dataclass(frozen=True)
class Compared:
    """The point of reference, and the loss of an answer by how far its reward is on its label's side of the point."""

    losses: Callable[[Tensor], Tensor]
    point: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # the same for all answers
    carried: Mapping[str, float] = field(default_factory=dict)  # numbers that the next step needs of this one


def kto(cfg: KTOConfig, values: Values) -> Compared:
    """σ(point − reward) of good answers, and σ(reward − point) of bad ones, up to a constant (Ethayarajh et al. 2024,
    arXiv 2402.01306).

    The point is β·KL. The divergence is estimated by answers to other prompts: the mean of their log-ratios over the
    whole train batch, or 0 if that is less.
    """
    assert values.mismatched_B is not None
    point = cfg.beta * max(0.0, float(values.mismatched_B.mean()))
    return Compared(lambda ahead_E: torch.sigmoid(-ahead_E), point, {"kl": point / cfg.beta})


def bco(cfg: BCOConfig, values: Values) -> Compared:
    """−log σ(reward − δ) of good answers, and −log σ(δ − reward) of bad ones (Jung et al. 2024, arXiv 2404.04656).

    δ is 0, or the mean reward of all answers that have been trained on, with those of this train batch.
    """
    point, carried = 0.0, dict[str, float]()
    if cfg.shift is Shift.mean:
        point, carried = shift_of(values, "bco", cfg.beta * log_ratio(values, "answer").detach())
    return Compared(logistic, point, {"bco/shift": point}, carried)


def apo_zero_unpaired(_cfg: APOZeroUnpairedConfig, _values: Values) -> Compared:
    """σ(−reward) of good answers, and σ(reward) of bad ones: the two terms of `apo_zero`, each of an answer of its
    own."""
    return Compared(lambda ahead_E: torch.sigmoid(-ahead_E))


UNPAIRED: dict[type[UnpairedConfig], Callable[[Any, Values], Compared]] = {
    KTOConfig: kto,
    BCOConfig: bco,
    APOZeroUnpairedConfig: apo_zero_unpaired,
}


@dataclass(frozen=True)
class UnpairedLoss:
    cfg: UnpairedConfig

    @cached_property
    def wanted(self) -> Wanted:
        together = getattr(self.cfg, "shift", None) is Shift.mean
        return Wanted(reference=True, labels=True, mismatched=self.cfg.mismatches, whole_batch=together)

    def __call__(self, values: Values) -> Losses:
        assert values.label_E is not None
        assert values.reference is not None
        cfg, compared = self.cfg, UNPAIRED[type(self.cfg)](self.cfg, values)
        logps_E, reference_E, good_E = values.logps["answer"], values.reference["answer"], values.label_E
        sign_E, point = 2 * good_E - 1, compared.point
        weight_E = cfg.desirable_weight * good_E + cfg.undesirable_weight * (1 - good_E)  # in their dtype, exactly
        rewards_E = cfg.beta * (logps_E - reference_E)
        losses_E = weight_E * compared.losses(sign_E * (rewards_E - point))
        ahead_E, logps_E = (sign_E * (rewards_E - point)).detach(), logps_E.detach()
        metrics_E = {"rewards/accuracies": accuracies(ahead_E, cfg.beta * (logps_E.abs() + reference_E.abs()))}
        weights_E: dict[str, Tensor] = {}
        for side, of_side_E in (("chosen", good_E), ("rejected", 1 - good_E)):
            metrics_E |= {f"rewards/{side}": rewards_E.detach(), f"logps/{side}": logps_E}
            weights_E |= {f"rewards/{side}": of_side_E, f"logps/{side}": of_side_E}
        metrics_E |= {name: torch.full_like(logps_E, value) for name, value in compared.metrics.items()}
        return Losses(losses_E, metrics_E, weights_E, compared.carried, MARGINS)
