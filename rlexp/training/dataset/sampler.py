"""The global sampler: on any layout, step k consumes the same samples in the same order (rule 1)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlexp.base.errors import ConfigError
from rlexp.training.dataset.mixture import Mixture


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
