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
from rlexp.config.schema import Config
from rlexp.config.sizes import divisors
from rlexp.errors import ConfigError, UserError
from rlexp.model.loading import load_config, random_model
from rlexp.rehearse.changes import Change, cost, singles
from rlexp.rehearse.children import Calls, at_once
from rlexp.rehearse.fit import STEP, Longest, fit_like, predict_and_fit, room, with_length
from rlexp.rehearse.layers import FEWEST, cycle_of
from rlexp.rehearse.log import Log
from rlexp.rehearse.predict import Found, Prediction, plan_of, rehearsals
from rlexp.rehearse.remedy import attempt, first_that_fits, laid_out
from rlexp.rehearse.run import preload
from rlexp.rehearse.sharding import Sharding, compare, kept, of_attention


@dataclass(frozen=True)
class Answer:
    cfg: Config
    parameters: int
    prediction: Prediction
    longest: Longest
    rings: dict[int, Longest | str]  # by ring size; a text says why there is no such ring
    changes: Sequence[Change]
    sharding: Sharding | None  # None for a ring of one
    engine_chosen: str | None = None  # why engine=auto takes this engine

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
        return None if self.fits else min(fitting, key=cost, default=None)


def answer(overrides: Sequence[str]) -> Answer:
    """Rehearse a configuration, then the same on other rings and with single changes."""
    composed = compose_elsewhere(overrides)
    model = load_config(composed.model, composed.data.max_length)
    processes = len(os.sched_getaffinity(0))
    parameters = count_parameters(model)
    preload()  # rehearsals are forked from this process
    engine = first_that_fits(composed, model)
    rings = {size: _like(engine.cfg, other) for size, other in _rings(composed, overrides)}
    there = [each for each in rings.values() if isinstance(each, Config)]
    cfg, *wider = at_once([laid_out(each, model) for each in (engine.cfg, *there)], processes)
    rings |= zip([size for size, each in rings.items() if isinstance(each, Config)], wider, strict=True)
    changes = list(singles(engine.cfg, engines=engine.chosen is None))
    (asked, longest), logs, *changed = at_once(
        [
            predict_and_fit(cfg, model, found=engine.found),
            logs_to_compare(cfg, model, engine.found),
            *(attempt(each, model) for _, each in changes),
        ],
        processes,
    )
    others = _others(rings, cfg, longest)
    slope = longest.slope * cfg.parallel.ring_size  # bytes for each token of a rank
    found = at_once([fit_like(other, model, slope / size, asked.grows) for size, other in others], processes)
    lengths: dict[int, Longest | str] = {size: each for size, each in rings.items() if isinstance(each, str)}
    lengths |= {size: result for (size, _), result in zip(others, found, strict=True)}
    lengths[cfg.parallel.ring_size] = longest
    predicted = zip(changes, changed, strict=True)
    tried = [*engine.others, *(Change.of(words, result) for (words, _), result in predicted)]
    sharding = shared_out(cfg, model, *logs) if logs else None
    return Answer(
        cfg, parameters, asked.prediction, longest, dict(sorted(lengths.items())), tried, sharding, engine.chosen
    )


def _like(cfg: Config, other: Config | str) -> Config | str:
    """Return another ring with the engine of the run."""
    return other if isinstance(other, str) else dataclasses.replace(other, engine=cfg.engine)


def _others(rings: dict[int, Config | str], cfg: Config, longest: Longest) -> list[tuple[int, Config]]:
    """Return the other rings, each at the length that it probably fits: as many tokens a rank."""
    found = []
    for size, other in rings.items():
        if isinstance(other, Config):
            length = (longest.tokens or cfg.data.max_length) * size // cfg.parallel.ring_size
            found.append((size, with_length(other, max(STEP * size, length))))
    return found


def logs_to_compare(cfg: Config, model: Any, known: Found | None) -> Calls:
    """Return logs of a few layers on the run's ring, which may be known, and with the same sequences on a ring of one.

    None if that is the ring.
    """
    if cfg.parallel.ring_size == 1:
        return None
    layers = next(cycle_of(model).few(model.num_hidden_layers, FEWEST), model.num_hidden_layers)
    if known is not None and known.log.layers == layers:
        return [known.log, *(yield from rehearsals([plan_of(alone(cfg), model, 0, layers)]))]
    return (yield from rehearsals(plan_of(each, model, 0, layers) for each in (cfg, alone(cfg))))


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


def _composed(overrides: Sequence[str], *words: str) -> Config | str:
    """Return the configuration with other words, which replace those for the same key, or why there is none."""
    keys = {each.partition("=")[0] for each in words}
    kept = [each for each in overrides if each.lstrip("+").partition("=")[0] not in keys]
    try:
        return compose_elsewhere([*kept, *words])
    except (ConfigError, UserError) as error:
        return str(error)
