"""The global sampler (rule 1): step k consumes the same samples in the same order, on any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlexp.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """One train batch: `indices` of all replicas together. Its size is the loss's denominator."""

    step: int  # from 1
    epoch: int  # from 0
    indices: tuple[int, ...]

    def micro_batches(self, replica: int, dp_size: int, micro_batch_size: int) -> list[tuple[int, ...]]:
        """The replica's slice, in micro-batches; as many on every replica, the last ones perhaps empty."""
        share = -(-len(self.indices) // dp_size)
        mine = self.indices[replica * share : (replica + 1) * share]
        count = -(-share // micro_batch_size)
        return [mine[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(count)]


@dataclass(frozen=True)
class Sampler:
    """A permutation of the data set by (seed, epoch), cut into train batches. The position is the step alone."""

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    key: str = "train.batch_size"  # what says how large a batch is
    kind: str = "pair"  # what there are `size` of

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            short = "more data, or data.drop_last=false" if self.kind == "pair" else "or more data"
            raise ConfigError(
                f"{self.key}={self.batch_size}: the data set has {self.size} {self.kind}s, less than one batch. "
                f"Use {self.key}={self.size} or less, {short}."
                if self.size
                else f"data: no {self.kind} is left to train on."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step` (from 1), from nothing but the seed."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return Batch(step, epoch, tuple(int(index) for index in order))

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        for step in range(first, last + 1):
            yield self.batch(step)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, epoch]).permutation(self.size)


def total_steps(steps_per_epoch: int, max_steps: int | None, epochs: int | None) -> int:
    """`max_steps` and `epochs` both bound a run; without either it is one epoch."""
    if max_steps is None:
        return steps_per_epoch * (epochs or 1)
    return max_steps if epochs is None else min(max_steps, steps_per_epoch * epochs)
