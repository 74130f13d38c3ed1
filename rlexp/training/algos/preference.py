"""The family of losses over pairs: what all have in common, and the sum of several.

A loss of the family is a `Formula`, in a file of its own. `Preference` makes of one formula or several what a run
trains on: it adds the supervised term, weighs the pairs, and logs the rewards. Shape letter: P pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.log_ratios import implicit_rewards
from rlexp.training.types import Wanted


@dataclass(frozen=True)
class Formula(ABC):
    """A loss of each pair. What a formula needs beyond sums of log-probabilities, it says in `needs`."""

    beta: float = 0.1
    margin_weight: float = 0.0
    needs: ClassVar[Wanted] = Wanted(reference=True)

    @property
    def wanted(self) -> Wanted:
        return self.needs | Wanted(margins=self.margin_weight > 0)

    @abstractmethod
    def losses(self, values: Values) -> Tensor:
        """Return the loss of each pair, (P,)."""

    def rewarded(self, values: Values) -> Values:
        """Return what the logged rewards are made of: these values, or their means over tokens."""
        return values

    def logged(self, values: Values) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return metrics of its own, (P,)."""
        return {}

    def carried(self, values: Values) -> Mapping[str, float]:  # noqa: ARG002
        """Return the numbers that the next step needs of this one."""
        return {}


@dataclass(frozen=True)
class Term:
    """A formula of a sum."""

    name: str
    weight: float
    formula: Formula


@dataclass(frozen=True)
class Preference:
    """A loss over pairs: the weighted sum of its terms, and the likelihood of the chosen answers."""

    terms: Sequence[Term]
    sft_weight: float = 0.0
    wpo: bool = False
    ld_alpha: float = 1.0

    @property
    def wanted(self) -> Wanted:
        own = Wanted(likelihoods=self.wpo, mean_tokens=self.sft_weight > 0, tail_weight=self.ld_alpha)
        return reduce(Wanted.__or__, (term.formula.wanted for term in self.terms), own)

    def __call__(self, values: Values) -> Losses:
        parts = {term.name: term.weight * term.formula.losses(shown(values, term.formula)) for term in self.terms}
        losses_P = sum(parts.values(), start=torch.zeros_like(values.tokens["chosen"]))
        metrics: dict[str, Tensor] = {}
        if self.wpo:
            metrics["wpo_weight"] = weight_P = on_policy_weight(values)
            losses_P = weight_P * losses_P
        if self.sft_weight:
            nll_P = -values.logps["chosen"] / values.mean_tokens
            metrics["nll_loss"] = nll_P.detach()
            losses_P = losses_P + self.sft_weight * nll_P
        if len(parts) > 1:
            metrics |= {f"loss/{name}": part_P.detach() for name, part_P in parts.items()}
        carried: dict[str, float] = {}
        for term in reversed(self.terms):  # the rewards are those of the first
            formula, own = term.formula, shown(values, term.formula)
            metrics |= {**implicit_rewards(formula.rewarded(own), formula.beta), **formula.logged(own)}
            carried |= formula.carried(own)
        return Losses(losses_P, metrics, carried=carried)


def shown(values: Values, formula: Formula) -> Values:
    """Return the values without a reference that only another term wants."""
    return values if formula.wanted.reference else replace(values, reference=None)


def on_policy_weight(values: Values) -> Tensor:
    """Return the weight of each pair by WPO (Zhou et al. 2024, arXiv 2406.11827, equation 2, as TRL writes it), (P,).

    For each answer, the mean over its tokens of log p − log Σ p², where p is the policy's distribution: how probable
    the token is, relative to one that the policy would draw. The weight is the product of both exponentials.
    """
    likelihoods = values.of_tokens["likelihoods"]
    with torch.no_grad():
        means = [(values.logps[side].detach() - likelihoods[side]) / values.tokens[side].clamp(min=1)
                 for side in ("chosen", "rejected")]  # fmt: skip
        return torch.exp(means[0] + means[1])
