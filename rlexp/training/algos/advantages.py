"""Advantages of an answer's tokens in float64, whitened over the train batch, and the weights of tokens and answers in
its loss. No weight is computed over a part of the batch.

Shape letters: L tokens of an answer, B samples of the train batch. `counts_B` is true where a sample is trained on.
After the last token no reward is expected. An empty answer that counts is counted in a mean over answers, and adds
nothing to its sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlexp.config.schema.losses import Normalize

EPS = 1e-8  # added to the variance of whitened advantages, as TRL does


def token_rewards(score: float, kl_L: Tensor, kl_coef: float) -> Tensor:
    """Return the reward of each token, (L,): minus the price of its divergence, plus the score at the last token."""
    rewards_L = -kl_coef * kl_L.double()
    rewards_L[-1:] += score  # an empty answer has no last token
    return rewards_L


def gae(rewards_L: Tensor, values_L: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438).

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}. With λ = 1 that is return-to-go − V_t, with λ = 0 it is δ_t.
    """
    values_L = values_L.double()
    later_L = torch.cat([values_L[1:], torch.zeros_like(values_L[:1])])
    deltas = (rewards_L + gamma * later_L - values_L).flip(0).tolist()
    backwards = list(accumulate(deltas, lambda later, delta: delta + gamma * lam * later))
    return torch.tensor(backwards, dtype=torch.float64).flip(0)


def returns_to_go(rewards_L: Tensor) -> Tensor:
    """Return for each token the sum of its reward and all later ones: no discount, no critic."""
    return rewards_L.flip(0).cumsum(0).flip(0)


def whiten(advantages: Sequence[Tensor], counts_B: Tensor) -> list[Tensor]:
    """Return (x − mean) / √(variance + ε) for the advantages (L,) of each sample; zeros for samples that do not count.

    Mean and unbiased variance (n − 1) are those of all tokens of the samples that count. Where all these advantages are
    equal there is nothing to learn, and the result is exactly 0 rather than what rounding leaves.
    """
    counts = [bool(each) for each in counts_B]
    counted = [each.double() for each, count in zip(advantages, counts, strict=True) if count and len(each)]
    if not counted or bool(torch.cat(counted).min() == torch.cat(counted).max()):
        return [torch.zeros_like(each) for each in advantages]
    mean, variance = mean_and_variance(counted)
    deviation = math.sqrt(variance + EPS)
    return [
        (each - mean) / deviation if count else torch.zeros_like(each)
        for each, count in zip(advantages, counts, strict=True)
    ]


def mean_and_variance(parts: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean and the unbiased variance of several tensors' elements, by the update of Chan et al. (1979).

    It adds one tensor at a time, in order: so the result does not depend on how torch would sum them all at once.
    """
    count, mean, squares = 0, 0.0, 0.0  # squares: the sum of squared distances from the mean
    for part in parts:
        part_mean = part.mean()
        before, count = count, count + len(part)
        distance, share = float(part_mean) - mean, len(part) / count
        mean += distance * share
        squares = squares + float((part - part_mean).square().sum()) + distance * distance * before * share
    return mean, squares / max(1, count - 1)


def centred(values: Tensor) -> Tensor:
    """Return the values less their mean; exactly 0 where all are equal, which the rounding of a mean would miss."""
    return torch.zeros_like(values) if bool(values.min() == values.max()) else values - values.mean()


def token_weight(normalize: Normalize, length_B: Tensor, counts_B: Tensor, fixed: int) -> Tensor:
    """Return the weight of each sample's tokens in the loss, (B,), in float64. `fixed` is rollout.max_new_tokens.

    Example: two answers of 1 and 3 tokens, `fixed` 4. token: ¼ and ¼; sequence: ½ and ⅙; fixed: ⅛ and ⅛.
    """
    counts_B = counts_B.bool()
    length_B = length_B.double()
    samples = counts_B.sum().double()
    match normalize:
        case Normalize.token:
            divisor_B = (length_B * counts_B).sum().expand_as(length_B)
        case Normalize.sequence:
            divisor_B = samples * length_B
        case Normalize.fixed:
            divisor_B = (samples * fixed).expand_as(length_B)
    return _inverse(divisor_B, counts_B & (length_B > 0))


def sequence_weight(counts_B: Tensor) -> Tensor:
    """Return the weight of each sample in a loss of whole sequences, (B,), in float64."""
    counts_B = counts_B.bool()
    return _inverse(counts_B.sum().double().expand(counts_B.shape), counts_B)


def _inverse(divisor_B: Tensor, where_B: Tensor) -> Tensor:
    """Return 1 / divisor where `where_B` is true, else 0."""
    return where_B.double() / torch.where(where_B, divisor_B, 1.0)
