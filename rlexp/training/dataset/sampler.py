"""The global sampler: on any layout, step k consumes the same samples in the same order (rule 1), of one source or of a
mixture."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rlexp.base.errors import ConfigError


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


@dataclass(frozen=True)
class Batch:
    """One train batch, with the `indices` of all replicas. Its size is the loss's denominator."""

    step: int  # from 1
    epoch: int  # from 0
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Sampler:
    """Cuts a permutation of the data set, fixed by (seed, epoch), into train batches. Its only position is the step.

    An evaluation has nothing to train on: then there are no samples, and no steps."""

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    key: str = "train.batch_size"  # the key that sets the batch size, for messages
    kind: str = "pair"  # what a sample is called in messages
    mixture: Mixture | None = None  # of several sources with weights; without one, an epoch takes all samples

    def __post_init__(self) -> None:
        if self.taken and self.steps_per_epoch == 0:
            short = "or more data" if self.kind == "prompt" else "more data, or data.drop_last=false"
            raise ConfigError(
                f"{self.key}={self.batch_size}: the data set has {self.taken} {self.kind}s, less than one batch. "
                f"Use {self.key}={self.taken} or less, {short}."
            )

    @property
    def taken(self) -> int:
        """The samples of an epoch."""
        return self.size if self.mixture is None else self.mixture.taken

    @property
    def steps_per_epoch(self) -> int:
        return self.taken // self.batch_size if self.drop_last else -(-self.taken // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the batch of optimizer step `step` (from 1). It depends on the seed alone."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return Batch(step, epoch, tuple(int(index) for index in order))

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        for step in range(first, last + 1):
            yield self.batch(step)

    @functools.lru_cache(maxsize=2)  # noqa: B019 (an epoch's order, and the next one's: 4 bytes a sample each)
    def _order(self, epoch: int) -> np.ndarray:
        if self.mixture is not None:
            order = self.mixture.order(self.seed, epoch, shuffle=self.shuffle)
        elif self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        else:
            order = np.arange(self.size)
        return order.astype(np.uint32) if len(order) < 1 << 32 else order


def total_steps(steps_per_epoch: int, max_steps: int | None, epochs: int | None) -> int:
    """Return the steps of a run, which both `max_steps` and `epochs` bound. With neither, it is one epoch."""
    if max_steps is None:
        return steps_per_epoch * (epochs or 1)
    return max_steps if epochs is None else min(max_steps, steps_per_epoch * epochs)
