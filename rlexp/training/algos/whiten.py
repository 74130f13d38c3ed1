"""Whitening: advantages with mean 0 and variance 1 over the train batch; and values less their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-8  # added to the variance, as TRL does


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
