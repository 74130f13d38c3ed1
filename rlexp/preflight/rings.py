"""The run on each ring that its ranks could make: what it needs at the asked length, and the longest that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.config.checks.micro_batches import shares
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.explain import explain
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import Kind
from rlexp.config.sizes import divisors
from rlexp.preflight.changes import fewer_tokens
from rlexp.preflight.children import Calls
from rlexp.preflight.longest_that_fits import STEP, Longest, fit_from, fit_sharing, with_length
from rlexp.preflight.predict import Found, Prediction, predict_fuller
from rlexp.preflight.remedy import laid_out
from rlexp.preflight.vllm import room

ELASTIC = "elastic"


@dataclass(frozen=True)
class OnRing:
    """The run on one ring. Where `refused` says why it cannot have that ring, the rest is None."""

    name: str  # the number of its ranks, or `elastic`
    own: bool  # the ring that was asked for
    refused: str | None = None
    asked: Prediction | None = None  # at the asked length
    longest: Longest | None = None
    sharing: Longest | None = None  # the longest pair that shares its prompt; None where nothing is shared

    @property
    def title(self) -> str:
        return self.name if self.name == ELASTIC else f"ring of {self.name}"


@dataclass(frozen=True)
class _Start:
    """A ring that the ranks can make, and the length from which the longest is searched."""

    asked: Config
    near: Config


def rings_of(
    cfg: Config, model: Any, overrides: Sequence[str], asked: Found, *, wanted: bool
) -> Calls[Sequence[OnRing]]:
    """Predict the run on its own ring, and on each other one that its ranks could make. Nothing where that is not
    wanted."""
    if not wanted:
        return ()
    own, longest = name_of(cfg), (yield from fit_from(cfg, model, asked))
    possible, refused = yield from _possible(cfg, model, overrides)
    # An elastic ring does what a fixed one of as many ranks does, which has widths too: it is rehearsed once.
    same = {name: next(first for first, before in possible.items() if alike(before, each))
            for name, each in possible.items()}  # fmt: skip
    starts = {name: _start(each, cfg, longest) for name, each in possible.items() if same[name] == name != own}
    slope = longest.slope * cfg.parallel.ring_size  # bytes for each token of a rank
    others = yield [_on_ring(each, model, slope, asked) for each in starts.values()]
    known = {own: (longest, asked.prediction)} | dict(zip(starts, others, strict=True))
    sharing: dict[str, Longest] = {}
    if not cfg.loss.draws and cfg.loss.rows is Kind.pairs and shares(cfg):
        near = {own: cfg} | {name: each.near for name, each in starts.items()}
        pairs = yield [fit_sharing(each, model, known[name][0], asked) for name, each in near.items()]
        sharing = dict(zip(near, pairs, strict=True))
    rings = [OnRing(name, name == own, refused=why) for name, why in refused.items()]
    for name, first in same.items():
        fits, here = known[first]
        rings.append(OnRing(name, name == own, None, here.with_share(), fits, sharing.get(first)))
    return sorted(rings, key=lambda ring: math.inf if ring.name == ELASTIC else int(ring.name))


def name_of(cfg: Config) -> str:
    return ELASTIC if cfg.parallel.elastic else str(cfg.parallel.ring_size)


def names_of(world_size: int) -> list[str]:
    """Return the rings that so many ranks could make."""
    fixed = [str(size) for size in divisors(world_size) if size.bit_count() == 1]
    return [*fixed, ELASTIC] if world_size > 1 else fixed


def alike(one: Config, other: Config) -> bool:
    """Say whether two rings of one run, whose other settings are the same, do the same."""
    plain = [dataclasses.replace(cfg.parallel, elastic=False, chosen=None) for cfg in (one, other)]
    return plain[0] == plain[1] and (one.train, one.rollout) == (other.train, other.rollout)


def _possible(cfg: Config, model: Any, overrides: Sequence[str]) -> Calls[tuple[dict[str, Config], dict[str, str]]]:
    """Return the configuration for each ring, the run's own first, and why there are no others."""
    names = [name for name in names_of(cfg.parallel.world_size) if name != name_of(cfg)]
    words = [f"parallel.ring_size={'auto' if name == ELASTIC else name}" for name in names]
    composed = yield [(_composed, (overrides, each)) for each in words]
    able = {name: dataclasses.replace(each, engine=cfg.engine)
            for name, each in zip(names, composed, strict=True) if isinstance(each, Config)}  # fmt: skip
    laid = yield [laid_out(each, model) for each in able.values()]
    refused = {name: each for name, each in zip(names, composed, strict=True) if isinstance(each, str)}
    return {name_of(cfg): cfg} | dict(zip(able, laid, strict=True)), refused


def _composed(overrides: Sequence[str], *words: str) -> Config | str:
    """Return the configuration with other words, which replace those for the same key, or why there is none."""
    keys = {each.partition("=")[0] for each in words}
    kept = [each for each in overrides if each.lstrip("+").partition("=")[0] not in keys]
    try:
        return compose_elsewhere([*kept, *words])
    except Exception as error:  # what a resolver refuses, as a batch that does not divide, comes as an error of Hydra's
        if (message := explain(error)) is None:
            raise
        return message


def _start(each: Config, own: Config, longest: Longest) -> _Start:
    """Begin at the length that probably fits: as many tokens a rank as on the run's own ring."""
    ring = each.parallel.ring_size
    tokens = (longest.tokens or own.data.max_length) * ring // own.parallel.ring_size
    return _Start(each, with_length(each, max(STEP * ring, tokens)))


def _on_ring(start: _Start, model: Any, slope: float, asked: Found) -> Calls[tuple[Longest, Prediction]]:
    """Find the longest sequence that fits on another ring than the own, and predict the asked length there. `slope` is
    a guess of the bytes that a token of a rank adds."""
    limit = room(start.near)
    first = yield from predict_fuller(start.near, model, asked.prediction.rank, asked.grows, limit)
    slope /= start.near.parallel.ring_size
    longest, here = yield [fit_from(start.near, model, first, slope), _at_asked(start, model, first, limit)]
    return longest, here


def _at_asked(start: _Start, model: Any, near: Found, limit: int) -> Calls[Prediction]:
    """Predict the asked length. Where the usual tokens of a micro-batch do not fit, it has fewer, as in a run.

    It is predicted anew: what a layer takes at another length, which `predict_again` starts from, is another time.
    """
    cfg, rank, here = start.asked, near.prediction.rank, near
    if cfg != start.near:
        here = yield from predict_fuller(cfg, model, rank, near.grows, limit)
    if here.prediction.fits_devices(limit) or cfg.train.max_tokens_per_micro_batch is not None:
        return here.prediction
    fewer = yield [predict_fuller(each, model, rank, here.grows, limit) for _, each in fewer_tokens(cfg)]
    tried = [each.prediction for each in (here, *fewer)]
    return next((each for each in tried if each.fits_devices(limit)), tried[-1])
