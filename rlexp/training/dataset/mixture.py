"""Several sources in one order: how many samples of each make an epoch, and which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Mixture:
    """Sources by weight. An epoch ends with the source that is used up first.

    Each source is gone through in an order of its own, which goes on from epoch to epoch: all rows come before any
    comes again.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the samples of each source in an epoch."""
        weights = [Fraction(str(weight)) for weight in self.weights]
        most = min(size / weight for size, weight in zip(self.sizes, weights, strict=True))
        return tuple(math.floor(weight * most) for weight in weights)

    @property
    def taken(self) -> int:
        return sum(self.counts)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        """Return the samples of an epoch by their places in all sources together."""
        counts = self.counts
        firsts = np.cumsum((0, *self.sizes[:-1]))
        places = np.concatenate(
            [
                first + self._of_source(source, count, seed, epoch, shuffle=shuffle)
                for source, (first, count) in enumerate(zip(firsts, counts, strict=True))
            ]
        )
        if shuffle:
            return places[np.random.default_rng([seed, epoch]).permutation(len(places))]
        evenly = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
        return places[np.argsort(evenly, kind="stable")]

    def _of_source(self, source: int, count: int, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        size = self.sizes[source]
        rounds, start = divmod(epoch * count, size)
        orders = [
            np.random.default_rng([seed, source, rounds + more, 1]).permutation(size) if shuffle else np.arange(size)
            for more in range(2 if start + count > size else 1)
        ]
        return np.concatenate(orders)[start : start + count]
