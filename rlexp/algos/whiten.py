"""Advantages over the train batch with mean 0 and variance 1, and values less their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-8  # added to the variance, as TRL and torchtune do


@dataclass(frozen=True)
class Moments:
    """Of the tokens of some answers. They add up in the order of the samples, so that whoever holds an answer needs
    five numbers of each of the others, and all come to the same to the last bit."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # of the distances from the mean, their sum
    least: float = math.inf
    most: float = -math.inf

    @staticmethod
    def of(advantages_L: Tensor) -> Moments:
        if len(advantages_L) == 0:
            return Moments()
        values_L = advantages_L.double()
        mean = values_L.mean()
        squares = (values_L - mean).square().sum()
        return Moments(len(values_L), float(mean), float(squares), float(values_L.min()), float(values_L.max()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        apart, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart * apart * self.count * share,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    def whiten(self, advantages_L: Tensor) -> Tensor:
        """(x − mean) / √(variance + ε), by the unbiased variance (n − 1). Where all are alike there is nothing to
        learn, and they are exactly 0: what rounding leaves of them has no say."""
        if self.least >= self.most:
            return torch.zeros_like(advantages_L)
        return (advantages_L - self.mean) / math.sqrt(self.squares / (self.count - 1) + EPS)


def whiten(advantages: Sequence[Tensor], counts_B: Tensor) -> list[Tensor]:
    """Of each sample of the train batch its advantages by token (L,), by the mean and the deviation of all tokens of
    the samples that count; zeros of those that do not."""
    counts = [bool(each) for each in counts_B]
    total = sum((Moments.of(each) for each, count in zip(advantages, counts, strict=True) if count), start=Moments())
    return [
        total.whiten(each) if count else torch.zeros_like(each) for each, count in zip(advantages, counts, strict=True)
    ]


def centred(values: Tensor) -> Tensor:
    """Less their mean; exactly 0 where all are alike, which the rounding of a mean would miss."""
    return torch.zeros_like(values) if bool(values.min() == values.max()) else values - values.mean()
