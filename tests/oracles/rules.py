"""The rules of a run, written out a second time from the documentation, on plain numbers.

No code comes from the modules of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rlexp.config.schema import Config, Decay, OptimConfig
from rlexp.config.schema.data import RowsDataConfig
from rlexp.config.schema.data_sources import sources_of

# ---- which samples, and how fast; `sizes` are the pairs of each source ----


def steps_per_epoch(cfg: Config, sizes: Sequence[int]) -> int:
    whole, rest = divmod(sum(shares(cfg, sizes)), cfg.train.batch_size)
    return whole + (1 if rest and not cfg.data.drop_last else 0)


def total_steps(cfg: Config, sizes: Sequence[int]) -> int:
    return bounded_steps(cfg, steps_per_epoch(cfg, sizes))


def bounded_steps(cfg: Config, an_epoch: int) -> int:
    """The steps that both `train.max_steps` and `train.epochs` allow; one epoch if neither is given."""
    by_epochs = an_epoch * (cfg.train.epochs or 1)
    if cfg.train.max_steps is None:
        return by_epochs
    return cfg.train.max_steps if cfg.train.epochs is None else min(cfg.train.max_steps, by_epochs)


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


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Rise in equal steps, of which the first is above 0 unless it is told to begin there; then fall to the least rate
    at the step after the last."""
    warm = optim.warmup_steps if optim.warmup_ratio is None else math.ceil(steps * optim.warmup_ratio)
    if step <= warm and optim.warmup_start is None:
        return optim.lr * step / (warm + 1)
    if step <= warm:
        return optim.lr * float(np.interp(step, [1, warm + 1], [optim.warmup_start or 0.0, 1.0]))
    left = 1.0 - (step - warm - 1) / max(1, steps - warm)
    left = max(0.0, left)
    if optim.decay is Decay.inverse_sqrt:
        long = warm if warm else 10_000
        return optim.lr * math.sqrt(long / (step - 1 - warm + long))
    shapes = {Decay.constant: 1.0, Decay.linear: left, Decay.cosine: (1 + math.cos(math.pi * (1 - left))) / 2}
    least = 1.0 if optim.decay is Decay.constant else optim.min_lr_ratio
    return optim.lr * (least + (1.0 - least) * shapes[optim.decay])
