"""All that preflight says of a configuration: its memory, what fits, what would help, and how long a step takes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlexp.config.rehearsed import compose_elsewhere
from rlexp.config.schema import Config, Offload
from rlexp.config.sizes import divisors
from rlexp.engines import ENGINES
from rlexp.errors import ConfigError, UserError
from rlexp.model.loading import load_config, random_model
from rlexp.rehearse.children import Calls, at_once
from rlexp.rehearse.fit import STEP, Longest, fit_like, predict_and_fit, predict_once, room, with_length
from rlexp.rehearse.log import Log
from rlexp.rehearse.predict import Prediction, plan_of
from rlexp.rehearse.run import preload, rehearse
from rlexp.rehearse.sharding import Sharding, compare, kept, of_attention

CHEAPEST = ("zero1", "zero2", "fsdp2", "zero3")  # engines, from the one that sends least to those that hold least


@dataclass(frozen=True)
class Change:
    """One change of the configuration, with what follows from it. `refused` says why it cannot be made."""

    words: str
    prediction: Prediction | None = None
    refused: str | None = None

    def fits(self, limit: int) -> bool:
        return self.prediction is not None and self.prediction.peak.bytes <= limit


@dataclass(frozen=True)
class Answer:
    cfg: Config
    parameters: int
    prediction: Prediction
    longest: Longest
    rings: dict[int, Longest | str]  # by ring size; a text says why there is no such ring
    changes: Sequence[Change]
    sharding: Sharding | None  # None for a ring of one

    @property
    def limit(self) -> int:
        return room(self.cfg)

    @property
    def fits(self) -> bool:
        return self.prediction.peak.bytes <= self.limit

    @cached_property
    def remedy(self) -> Change | None:
        """The change that fits and takes the least time; None if the run fits, or no single change makes it fit."""
        fitting = [change for change in self.changes if change.fits(self.limit)]
        return None if self.fits else min(fitting, key=seconds_of, default=None)


def seconds_of(change: Change) -> float:
    return seconds(change.prediction) if change.prediction is not None else float("inf")


def seconds(prediction: Prediction) -> float:
    """Return the estimated seconds of a step."""
    counts = prediction.counts()
    return counts.seconds + counts.waited


def answer(overrides: Sequence[str]) -> Answer:
    """Rehearse a configuration, then the same on other rings and with single changes."""
    cfg = compose_elsewhere(overrides)
    model = load_config(cfg.model, cfg.data.max_length)
    processes = len(os.sched_getaffinity(0))
    parameters = count_parameters(model)
    preload()  # rehearsals are forked from this process
    (asked,) = at_once([predict_and_fit(cfg, model)], processes)
    rings, changes = dict(_rings(cfg, overrides)), list(_changes(cfg, overrides))
    others = _others(rings, cfg, asked.longest)
    slope = asked.longest.slope * cfg.parallel.ring_size  # bytes for each token of a rank
    *found, one = at_once(
        [
            *(fit_like(other, model, slope / size, asked.slopes) for size, other in others),
            *(predict_once(each, model) for _, each in changes if isinstance(each, Config)),
            rehearsed_alone(cfg, model, asked.log.layers),
        ],
        processes,
    )
    lengths: dict[int, Longest | str] = {size: each for size, each in rings.items() if isinstance(each, str)}
    lengths |= {size: result for (size, _), result in zip(others, found, strict=False)}
    lengths[cfg.parallel.ring_size] = asked.longest
    predicted = iter(found[len(others) :])
    tried = [
        Change(words, refused=each) if isinstance(each, str) else Change(words, next(predicted))
        for words, each in changes
    ]
    sharding = None if one is None else shared_out(cfg, model, asked.log, one)
    return Answer(cfg, parameters, asked.prediction, asked.longest, dict(sorted(lengths.items())), tried, sharding)


def _others(rings: dict[int, Config | str], cfg: Config, longest: Longest) -> list[tuple[int, Config]]:
    """Return the other rings, each at the length that it probably fits: as many tokens a rank."""
    found = []
    for size, other in rings.items():
        if isinstance(other, Config):
            length = (longest.tokens or cfg.data.max_length) * size // cfg.parallel.ring_size
            found.append((size, with_length(other, max(STEP * size, length))))
    return found


def rehearsed_alone(cfg: Config, model: Any, layers: int) -> Calls:
    """Rehearse so many layers on a ring of one with the same sequences; None if that is the ring."""
    if cfg.parallel.ring_size == 1:
        return None
    (one,) = yield [(rehearse, (plan_of(alone(cfg), model, 0, layers),))]
    return one


def shared_out(cfg: Config, model: Any, ring: Log, one: Log) -> Sharding:
    assert ring.layers == one.layers, "logs of other numbers of layers"
    return compare(kept(ring), kept(one), cfg.parallel.ring_size, attention=of_attention(cfg, model))


def alone(cfg: Config) -> Config:
    """Return the configuration of one replica on a ring of one."""
    parallel = dataclasses.replace(cfg.parallel, ring_size=1, world_size=cfg.parallel.dp_size, ulysses_size=None)
    if cfg.parallel.layout.value in ("hybrid", "ulysses", "auto"):
        parallel = dataclasses.replace(parallel, layout=type(cfg.parallel.layout).zigzag)
    return dataclasses.replace(cfg, parallel=parallel)


def count_parameters(model: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in random_model(model, 2).parameters())


def _rings(cfg: Config, overrides: Sequence[str]) -> Iterator[tuple[int, Config | str]]:
    """Yield the other ring sizes that the ranks could have, with their configuration."""
    size = 1
    world = cfg.parallel.world_size
    while size <= world:
        if size in divisors(world) and size != cfg.parallel.ring_size:
            yield size, _composed(overrides, f"parallel.ring_size={size}")
        size *= 2


def _changes(cfg: Config, overrides: Sequence[str]) -> Iterator[tuple[str, Config | str]]:
    """Yield single changes that need less memory."""
    if not cfg.memory.checkpointing:
        yield _change(overrides, "memory.checkpointing=true")
    double = 2 * cfg.parallel.ring_size
    if cfg.parallel.world_size % double == 0:
        yield _change(overrides, f"parallel.ring_size={double}")
    name = cfg.engine.name.value
    held = CHEAPEST.index(name) if name in CHEAPEST else -1
    for engine in CHEAPEST[held + 1 :]:
        yield _change(overrides, f"engine={engine}")
    if cfg.engine.offload is Offload.none and "optimizer" in ENGINES[name].offload:
        yield _change(overrides, "engine.offload=optimizer")
    if cfg.train.micro_batch_size > 1:
        yield _change(overrides, f"train.micro_batch_size={cfg.train.micro_batch_size // 2}")


def _change(overrides: Sequence[str], words: str) -> tuple[str, Config | str]:
    return words, _composed(overrides, words)


def _composed(overrides: Sequence[str], *words: str) -> Config | str:
    """Return the configuration with other words, which replace those for the same key, or why there is none."""
    keys = {each.partition("=")[0] for each in words}
    kept = [each for each in overrides if each.lstrip("+").partition("=")[0] not in keys]
    try:
        return compose_elsewhere([*kept, *words])
    except (ConfigError, UserError) as error:
        return str(error)
