"""Which samples a step takes, written a second time from the documentation. `sizes` are the pairs of each source."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.data_sources import sources_of


def steps_per_epoch(cfg: Config, sizes: Sequence[int]) -> int:
    whole, rest = divmod(sum(shares(cfg, sizes)), cfg.train.batch_size)
    return whole + (1 if rest and not cfg.data.drop_last else 0)


def samples_of(cfg: Config, sizes: Sequence[int], step: int) -> tuple[int, ...]:
    """The samples of an optimizer step; steps count from 1."""
    an_epoch = steps_per_epoch(cfg, sizes)
    epoch, place = (step - 1) // an_epoch, (step - 1) % an_epoch
    order = order_of(cfg, sizes, epoch)
    return tuple(order[place * cfg.train.batch_size :][: cfg.train.batch_size])


def shares(cfg: Config, sizes: Sequence[int]) -> list[int]:
    """The samples of each source in an epoch: all, or as the weights share them out until one source is used up."""
    weights = weights_of(cfg)
    if not weights:
        return list(sizes)
    least = min(range(len(sizes)), key=lambda source: sizes[source] / weights[source])
    return [int(weight * sizes[least] / weights[least]) for weight in weights]


def weights_of(cfg: Config) -> list[Fraction]:
    given = [each.cfg.weight for each in sources_of(cfg.data)] if isinstance(cfg.data, RowsDataConfig) else []
    return [Fraction(str(float(weight))) for weight in given if weight is not None]


def order_of(cfg: Config, sizes: Sequence[int], epoch: int) -> list[int]:
    """The samples of an epoch, from 0: a permutation of them all, or of each source's next ones."""
    counts = shares(cfg, sizes)
    if not weights_of(cfg):
        samples = list(range(sum(sizes)))
    elif cfg.data.shuffle:
        samples = [sum(sizes[:source]) + place for source, count in enumerate(counts)
                   for place in _next_ones(cfg.seed, source, sizes[source], epoch * count, count)]  # fmt: skip
    else:  # spread over the epoch as evenly as each source's count allows
        spread = [((place + 0.5) / count, source, (epoch * count + place) % sizes[source])
                  for source, count in enumerate(counts) for place in range(count)]  # fmt: skip
        return [sum(sizes[:source]) + place for _, source, place in sorted(spread, key=lambda each: each[:2])]
    if cfg.data.shuffle:
        samples = [samples[place] for place in np.random.default_rng([cfg.seed, epoch]).permutation(len(samples))]
    return samples


def _next_ones(seed: int, source: int, size: int, first: int, count: int) -> list[int]:
    """Samples of a source that is gone through again and again, each time in an order of its own."""
    rounds = range((first + count) // size + 1)
    orders = [np.random.default_rng([seed, source, again, 1]).permutation(size).tolist() for again in rounds]
    return [orders[place // size][place % size] for place in range(first, first + count)]
