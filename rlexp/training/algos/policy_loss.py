"""Interface of the algorithms of reinforcement learning.

An algorithm is called at three points. When all answers of a rollout are scored, `credit` says what each answer has
earned relative to the others. For each answer, `spread` gives that credit to its tokens. In training, the call itself
computes the loss of each micro-batch. Its sums are over *weighted* tokens: the weights already hold the global counts
of the train batch, so nothing is divided here.

Shape letters: N samples of a rollout, L tokens of an answer, n tokens of answers on this rank, S sequences of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlexp.training.types import Wanted


@dataclass(frozen=True)
class Outcomes:
    """Results of all samples of a rollout, in the order of their places, in float64; the same on every rank."""

    scores_N: Tensor
    kl_N: Tensor  # the answer's divergence from the reference, summed over its tokens; zeros without a reference
    group_N: Tensor  # the place of its prompt in the rollout


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns of one answer's tokens, in float64."""

    advantages_L: Tensor
    returns_L: Tensor | None = None  # the critic's targets


@dataclass(frozen=True)
class PolicyTokens:
    """A rank's tokens of a micro-batch's answers. Tokens that do not count have weight 0."""

    logps_n: Tensor  # log-probabilities of the policy, with their gradient
    old_n: Tensor  # the same before the first step on these samples
    behaviour_n: Tensor  # the same under the weights that drew the samples
    reference_n: Tensor | None
    advantages_n: Tensor
    entropy_n: Tensor  # with a gradient if the algorithm has an entropy bonus
    values_n: Tensor | None  # the critic's, with their gradient
    old_values_n: Tensor | None
    returns_n: Tensor | None
    weight_n: Tensor  # weight of the token's term in the loss of the train batch
    trained_n: Tensor  # 1.0 where the token counts, else 0.0
    sequence_n: Tensor  # index of the token's sequence
    weight_S: Tensor  # weight in a loss of whole sequences: 1 / (sequences that count), or 0
    length_S: Tensor  # length of the sequence's answer
    by_sequence: Callable[[Tensor], Tensor]  # (n,) to (S,): sums over the ring, differentiable


@dataclass(frozen=True)
class PolicyTerms:
    """The loss of a micro-batch on one rank, and the values to log.

    `loss` is the part that this rank differentiates. Of token terms it holds this rank's tokens; a sequence term it
    holds whole, because the backward of the sum over the ring is the identity.
    """

    loss: Tensor
    weighted: dict[str, Tensor]  # parts of the loss from token terms; their total is the sum over all ranks
    replicated: dict[str, Tensor]  # parts of the loss from sequence terms; equal on every rank of a ring
    means_n: dict[str, Tensor]  # detached; logged as the mean over the trained tokens of the train batch
    peaks_n: dict[str, Tensor]  # detached; logged as the maximum over the trained tokens of the train batch


class PolicyLoss(Protocol):
    """One algorithm. `kl_coef` is the coefficient of the divergence; a controller may move it after each rollout."""

    @property
    def wanted(self) -> Wanted: ...

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        """Return what each answer has earned, (N,)."""

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> TokenAdvantages:
        """Give an answer's credit to its tokens. `kl_L` estimates their divergence; zeros without a reference."""

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms: ...
