"""What the algorithms of reinforcement learning take and give.

An algorithm is asked three times. Once all answers of a rollout are scored: what each has earned, held against the
others (`credit`). Then for each answer: how that is spread over its tokens (`spread`). And in training, micro-batch
by micro-batch: its loss. All sums it gives are of *weighted* tokens whose weights already hold the train batch's
global counts, so that nothing is divided here.

Shape letters: N samples of a rollout, L tokens of an answer, t tokens of this rank, S sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """Of all samples of a rollout, in the order of their places: the same on every rank, in float64."""

    scores_N: Tensor
    kl_N: Tensor  # the answer's divergence from the reference, summed over its tokens; zeros without a reference
    group_N: Tensor  # the place of its prompt in the rollout


@dataclass(frozen=True)
class Spread:
    """Of one answer, by token, in float64."""

    advantages_L: Tensor
    returns_L: Tensor | None = None  # what the critic is to say


@dataclass(frozen=True)
class PolicyTokens:
    """What a rank holds of a micro-batch. Tokens that are not trained on have weight 0, and finite values."""

    logps_t: Tensor  # of the policy, with its gradient
    old_t: Tensor  # of the policy before the first step on these samples
    behaviour_t: Tensor  # of the weights that drew them
    reference_t: Tensor | None
    advantages_t: Tensor
    entropy_t: Tensor  # with a gradient where the algorithm has an entropy bonus
    values_t: Tensor | None  # of the critic, with its gradient
    old_values_t: Tensor | None
    returns_t: Tensor | None
    weight_t: Tensor  # that the token's term has in the loss of the train batch
    trained_t: Tensor  # 1.0 where the token counts, else 0.0
    sequence_t: Tensor  # which of the S sequences the token belongs to; S where to none
    weight_S: Tensor  # that the sequence has in a loss by sequences: 1 / (sequences that count), or 0
    length_S: Tensor  # of its answer
    by_sequence: Callable[[Tensor], Tensor]  # (t,) to (S,): the sums over the ring, differentiable


@dataclass(frozen=True)
class PolicyTerms:
    """`loss` is this rank's part, to be differentiated: token terms are its own tokens', a term by sequences is the
    whole (the sum over the ring's backward is the identity). What is logged comes apart."""

    loss: Tensor
    weighted: dict[str, Tensor]  # parts of the loss, sums of weighted token terms: to be added up over all ranks
    replicated: dict[str, Tensor]  # the same of terms by sequences: the same on every rank of a ring
    means_t: dict[str, Tensor]  # by token, detached: to be averaged over the train batch's trained tokens
    peaks_t: dict[str, Tensor]  # by token, detached: the largest of the train batch's trained tokens


class PolicyLoss(Protocol):
    """`kl_coef` is the divergence's coefficient, which a controller may move from rollout to rollout."""

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_critic(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy takes part in the gradient."""

    @property
    def groups(self) -> bool:
        """Whether an answer is held against others to the same prompt, so that one alone learns nothing."""

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        """(N,): what each answer has earned."""

    def spread(self, credit: float, kl_L: Tensor, values_L: Tensor | None, kl_coef: float) -> Spread:
        """`kl_L`: the estimate of each token's divergence, zeros without a reference."""

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms: ...
