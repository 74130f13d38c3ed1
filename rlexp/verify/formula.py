"""The loss's formula, applied apart from the run: once, to the forward pass's own values of a whole train batch.

The formula itself is the product's (`training/algos/`), and its own tests hold it to the papers and to TRL. What
`verify` judges is all that surrounds it: what it is given, for which samples, and what becomes of its results.

Shape letters: E examples, N samples of a rollout, T tokens of all answers of a train batch, S answers, L tokens of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.build import build_loss, build_policy_loss
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTokens
from rlexp.verify.recording import Array, TokenExample

OF_TOKENS = ("likelihoods", "entropies", "hits")  # log Σ p², the entropy, and whether the token is the likeliest
NOW = ("policy", "entropies", "values")  # what the models say now, by which a policy loss is differentiated
KNOWN = ("old", "behaviour", "reference", "advantages", "old_values", "returns")  # what was known of each token before


def policy_loss_of(cfg: Config) -> PolicyLoss:
    assert isinstance(cfg.loss, PolicyLossConfig)
    return build_policy_loss(cfg.loss, cfg.rollout.importance_cap)


# ---- answers that the rows give ----


@dataclass(frozen=True)
class BatchCounts:
    """What the examples of a batch give to the loss beside what models say of them."""

    tokens: Mapping[str, Array]  # trained tokens of each answer, by side
    mean_tokens: float  # of the first answers
    margins: Array | None
    labels: Array | None

    @staticmethod
    def of(batch: Sequence[TokenExample]) -> BatchCounts:
        sides = batch[0].sides
        tokens = {side: np.array([len(example.trained(side)) for example in batch], dtype=float) for side in sides}
        labels = [example.label for example in batch]
        return BatchCounts(
            tokens=tokens, mean_tokens=float(tokens[sides[0]].sum()) / len(batch),
            margins=np.array([example.margin or 0.0 for example in batch], dtype=float),
            labels=None if None in labels else np.array(labels, dtype=float),
        )  # fmt: skip


@dataclass(frozen=True)
class JudgedBatch:
    """What the formula makes of a whole batch: losses and logged values of its examples, and derivatives by sums."""

    losses: Losses
    slopes: Mapping[str, Array]

    def weights(self, name: str, count: int) -> Array:
        """The weight of each example in the mean of a value."""
        weights = self.losses.weights_E.get(name)
        return np.ones(count) if weights is None else weights.detach().numpy()


def judge(
    cfg: Config, sums: Mapping[str, Mapping[str, Array]], counts: BatchCounts, carried: Mapping[str, float],
    mismatched: Array | None, *, held_out: bool = False,
) -> JudgedBatch:  # fmt: skip
    """Apply the loss to the sums of a batch, by who says them and by side."""
    loss = build_loss(cfg.loss)
    by_side = {who: {side: torch.tensor(each, dtype=torch.float64) for side, each in sides.items()}
               for who, sides in sums.items()}  # fmt: skip
    policy = {side: each.requires_grad_() for side, each in by_side["policy"].items()}
    scores = loss.wanted.scores
    values = Values(
        logps={} if scores else policy, scores=policy if scores else None, reference=by_side.get("reference"),
        tokens={side: torch.tensor(each, dtype=torch.float64) for side, each in counts.tokens.items()},
        of_tokens={who: by_side[who] for who in OF_TOKENS if who in by_side},
        margin_E=_tensor(counts.margins), label_E=_tensor(counts.labels), mismatched_B=_tensor(mismatched),
        mean_tokens=counts.mean_tokens, carried=carried, held_out=held_out,
    )  # fmt: skip
    with torch.enable_grad():
        losses = loss(values)
        slopes = torch.autograd.grad(losses.losses_E.sum(), list(policy.values()), allow_unused=True)
    return JudgedBatch(losses, {side: (torch.zeros_like(policy[side]) if slope is None else slope).numpy()
                           for side, slope in zip(policy, slopes, strict=True)})  # fmt: skip


def _tensor(values: Array | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


# ---- answers that the policy draws ----


@dataclass(frozen=True)
class Answers:
    """A train batch: columns of values of each answer's tokens, and the weights of tokens and of whole answers."""

    columns: Mapping[str, Sequence[Array]]  # of NOW and KNOWN, as far as the loss needs them
    weights: Sequence[float]
    counts: Sequence[bool]
    answer_weights: Sequence[float]

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.columns["policy"]]


@dataclass(frozen=True)
class Terms:
    """What the formula of a policy loss makes of a train batch."""

    parts: Mapping[str, float]  # the loss, and its parts
    means: Mapping[str, Array]  # values of each token whose mean is logged
    peaks: Mapping[str, Array]  # and those whose maximum is
    slopes: Mapping[str, Array] = field(default_factory=dict)  # derivatives by what the models say of each token

    @property
    def size(self) -> float:
        """How far the loss moves if each token's log-probability moves by 1: the size of its terms, which may cancel"""
        return max(abs(self.parts["loss"]), float(np.abs(self.slopes["policy"]).sum()))


def terms_of(loss: PolicyLoss, batch: Answers, kl_coef: float) -> Terms:
    """Apply the loss to a whole train batch at once."""
    lengths = batch.lengths
    owner_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def column(name: str) -> Tensor | None:
        values = batch.columns.get(name)
        return None if values is None else torch.from_numpy(np.concatenate(values).astype(np.float64))

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[owner_T]

    def by_answer(values_T: Tensor) -> Tensor:
        return torch.zeros(len(lengths), dtype=values_T.dtype).index_add(0, owner_T, values_T)

    now = {name: values.requires_grad_() for name in NOW if (values := column(name)) is not None}
    tokens = PolicyTokens(
        logps_n=now["policy"], entropy_n=now["entropies"], values_n=now.get("values"),
        **{f"{name}_n": column(name) for name in KNOWN},  # type: ignore[arg-type]
        weight_n=spread(batch.weights), trained_n=spread([float(each) for each in batch.counts]), sequence_n=owner_T,
        weight_S=torch.tensor(batch.answer_weights, dtype=torch.float64),
        length_S=torch.tensor(lengths, dtype=torch.float64), by_sequence=by_answer,
    )  # fmt: skip
    with torch.enable_grad():
        terms = loss(tokens, kl_coef)
        slopes = torch.autograd.grad(terms.loss, list(now.values()), allow_unused=True)
    parts = {"loss": terms.loss, **terms.weighted, **terms.replicated}
    return Terms(
        parts={name: float(each.detach()) for name, each in parts.items()},
        means={name: each.detach().numpy() for name, each in terms.means_n.items()},
        peaks={name: each.detach().numpy() for name, each in terms.peaks_n.items()},
        slopes={name: (torch.zeros_like(now[name]) if slope is None else slope).numpy()
                for name, slope in zip(now, slopes, strict=True)},
    )  # fmt: skip


@dataclass(frozen=True)
class Credited:
    """What samples have earned, the advantages of their tokens, and the critic's targets if there is one."""

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
