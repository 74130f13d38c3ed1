"""The formulas of a policy loss, applied apart from the run: to the reference's own values, and to those of the run.

The formulas are the product's (`training/algos/`), and their own tests hold them to the papers and to TRL. What
`verify` judges is all that surrounds them: what they are given, for which samples, and what becomes of their results.

Shape letters: N samples of a rollout, T tokens of all answers of a train batch, S answers, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTokens
from rlexp.verify.records import Array, Terms, joined

SAID = ("policy", "entropies", "values")  # what the models say now, by which the loss is differentiated
KNOWN = ("old", "behaviour", "reference", "advantages", "old_values", "returns")  # what was known of each token before


@dataclass(frozen=True)
class Answers:
    """A train batch: columns of values of each answer's tokens, and the weights of tokens and of whole answers."""

    columns: Mapping[str, Sequence[Array]]  # of SAID and KNOWN, as far as the loss needs them
    weights: Sequence[float]
    counts: Sequence[bool]
    answer_weights: Sequence[float]

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.columns["policy"]]


def terms_of(loss: PolicyLoss, batch: Answers, kl_coef: float, dtype: torch.dtype = torch.float64) -> Terms:
    """Apply the loss to a whole train batch at once."""
    lengths = batch.lengths
    owner_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def column(name: str) -> Tensor | None:
        values = batch.columns.get(name)
        return None if values is None else torch.from_numpy(joined(values).astype(np.float64)).to(dtype)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[owner_T].to(dtype)

    def by_answer(values_T: Tensor) -> Tensor:
        return torch.zeros(len(lengths), dtype=values_T.dtype).index_add(0, owner_T, values_T)

    said = {name: values.requires_grad_() for name in SAID if (values := column(name)) is not None}
    known = {name: column(name) for name in KNOWN}
    tokens = PolicyTokens(
        logps_n=said["policy"],
        entropy_n=said["entropies"],
        values_n=said.get("values"),
        old_n=_there(known["old"]),
        behaviour_n=_there(known["behaviour"]),
        reference_n=known["reference"],
        advantages_n=_there(known["advantages"]),
        old_values_n=known["old_values"],
        returns_n=known["returns"],
        weight_n=spread(batch.weights),
        trained_n=spread([float(each) for each in batch.counts]),
        sequence_n=owner_T,
        weight_S=torch.tensor(batch.answer_weights, dtype=torch.float64).to(dtype),
        length_S=torch.tensor(lengths, dtype=dtype),
        by_sequence=by_answer,
    )
    with torch.enable_grad():
        terms = loss(tokens, kl_coef)
        slopes = torch.autograd.grad(terms.loss, list(said.values()), allow_unused=True)
    return Terms(
        loss=float(terms.loss.detach()),
        weighted={name: float(each) for name, each in terms.weighted.items()},
        replicated={name: float(each) for name, each in terms.replicated.items()},
        means={name: each.double().numpy() for name, each in terms.means_n.items()},
        peaks={name: each.double().numpy() for name, each in terms.peaks_n.items()},
        slopes={
            name: (torch.zeros_like(said[name]) if slope is None else slope).double().numpy()
            for name, slope in zip(said, slopes, strict=True)
        },
        kl_coef=kl_coef,
    )


def _there(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


@dataclass(frozen=True)
class Credited:
    """Advantages by sample, and the critic's targets if there is one."""

    credit: Array
    advantages: list[Array]
    returns: list[Array] | None


def credited(
    loss: PolicyLoss, scores_N: Array, divergences: Sequence[Array], values: Sequence[Array] | None, kl_coef: float,
    n_samples: int,
) -> Credited:  # fmt: skip
    """Give each sample of a rollout its credit, and each of its tokens an advantage. `divergences` are estimates of
    each token's."""
    sums_N = torch.tensor([float(each.sum()) for each in divergences], dtype=torch.float64)
    group_N = torch.arange(len(scores_N)) // n_samples
    outcomes = Outcomes(torch.from_numpy(np.asarray(scores_N, dtype=np.float64)), sums_N, group_N)
    credit_N = loss.credit(outcomes, kl_coef)
    advantages, returns = [], []
    for place, kl_L in enumerate(divergences):
        values_L = None if values is None else torch.from_numpy(np.float64(values[place]))
        spread = loss.spread(float(credit_N[place]), torch.from_numpy(kl_L), values_L, kl_coef)
        advantages.append(spread.advantages_L.numpy())
        if spread.returns_L is not None:
            returns.append(spread.returns_L.numpy())
    return Credited(credit_N.numpy(), advantages, returns or None)


@dataclass(frozen=True)
class GivenToFormulas:
    """What a run gave to the formulas: of each rollout scores, divergences, values and the coefficient, and of each
    step its train batch and the coefficient."""

    rollouts: Sequence[tuple[Array, list[Array], list[Array] | None, float]]
    steps: Sequence[tuple[Answers, float]]
    double: bool  # whether the run computes the loss in float64, and not in float32


@dataclass(frozen=True)
class JudgedAgain:
    """What the formulas make of it, applied to whole rollouts and whole train batches."""

    rollouts: Sequence[Credited]
    steps: Sequence[Terms]


def judged_again(loss: PolicyLoss, given: GivenToFormulas, n_samples: int) -> JudgedAgain:
    dtype = torch.float64 if given.double else torch.float32
    return JudgedAgain(
        [credited(loss, *rollout, n_samples) for rollout in given.rollouts],
        [terms_of(loss, batch, coefficient, dtype) for batch, coefficient in given.steps],
    )


def means_of(terms: Sequence[Terms], trained: Sequence[Array]) -> dict[str, float]:
    """The logged means and maxima over the trained tokens of a batch, of which each part has some."""
    count = sum(float(each.sum()) for each in trained)
    if not count:
        return {}
    row = {
        name: sum(float((part.means[name] * mine).sum()) for part, mine in zip(terms, trained, strict=True)) / count
        for name in terms[0].means
    }
    for name in terms[0].peaks:
        row[name] = max(
            float(part.peaks[name][mine > 0].max())
            for part, mine in zip(terms, trained, strict=True)
            if (mine > 0).any()
        )
    return row
