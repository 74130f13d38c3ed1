"""The first engine that fits, and the cheapest change, or pair of changes, that makes a run fit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.base.byte_counts import size
from rlexp.config.checks.layout import heads_in, with_layout
from rlexp.config.schema import Config, LayoutName
from rlexp.preflight import changes
from rlexp.preflight.changes import OTHERWISE, Change, Words, cheapest_alone, needed, pairs, singles, trains_otherwise
from rlexp.preflight.children import Calls, at_once
from rlexp.preflight.fastest_layout import choosing
from rlexp.preflight.predict import Found, Prediction, predict
from rlexp.preflight.vllm import room

Result = Found | Exception


@dataclass(frozen=True)
class Taken:
    """A configuration with the engine that a run takes. `chosen` says why, and `others` are the engines that were tried
    too, where engine=auto was given. `outcome` is None where nothing but a build was predicted."""

    cfg: Config
    chosen: str | None = None
    others: Sequence[Change] = ()
    outcome: Found | None = None

    def fits(self, limit: int) -> bool:
        """Say whether it fits on its devices: engines and micro-batches change little of what a machine holds."""
        return self.outcome is not None and self.outcome.prediction.fits_devices(limit)


def first_that_fits(cfg: Config, model: Any) -> Calls[Taken]:
    """Return the run with the engine that it takes, and with fewer tokens in a micro-batch than usual if it does not
    fit else, and nobody said how many."""
    fewer = [each for _, each in changes.fewer_tokens(cfg)] if cfg.train.max_tokens_per_micro_batch is None else []
    limit = room(cfg)
    taken = yield from _first_engine(cfg, model, predicted=bool(fewer))
    if not fewer or taken.outcome is None or taken.fits(limit):  # None: what is built is too large by itself
        return taken
    taken = yield from _first_engine(fewer[-1], model, predicted=True)
    if not taken.fits(limit):
        return taken
    more = [dataclasses.replace(each, engine=taken.cfg.engine) for each in fewer[:-1]]
    results: Sequence[Result] = yield [attempt(each, model, limit) for each in more]
    several = [dataclasses.replace(taken, cfg=each, outcome=whole(result))
               for each, result in zip(more, results, strict=True)]  # fmt: skip
    return next((each for each in several if each.fits(limit)), taken)


def _first_engine(cfg: Config, model: Any, *, predicted: bool) -> Calls[Taken]:
    """Return the run with the engine that was named, which is `predicted` only on request; or with engine=auto the
    first that fits, or the smallest."""
    named, limit = cfg.engine.chosen is None, room(cfg)
    if named and not predicted:
        return Taken(cfg)
    options = [cfg] if named else changes.engines_for(cfg)
    (first,) = yield [attempt(options[0], model, limit)]
    if named:
        return Taken(cfg, outcome=None if whole(first).prediction.build_alone else first)
    if whole(first).prediction.fits_devices(limit):
        return Taken(options[0], "the default, and it fits", (), first)
    rest = yield [attempt(each, model, limit) for each in options[1:]]
    names = [each.engine.name.value for each in options]
    results: dict[str, Result] = dict(zip(names, [first, *rest], strict=True))
    known = {name: each.prediction for name, each in results.items() if isinstance(each, Found)}
    fitting = [name for name, each in known.items() if each.fits_devices(limit)]
    best = fitting[0] if fitting else min(known, key=lambda name: (known[name].build_alone, known[name].peak.bytes))
    before = list(known)[: list(known).index(best)] if fitting else list(known)
    needs = ", ".join(f"{name} needs {needed(known[name])}" for name in before)
    fits = f"the first that fits, with {needed(known[best])} of {size(limit)}; {needs}"
    others = [Change.of(f"engine={name}", result) for name, result in results.items() if name != best]
    why = fits if fitting else f"no engine fits ({needs})"
    return Taken(options[names.index(best)], why, others, None if known[best].build_alone else whole(results[best]))


def cheapest(taken: Taken, asked: Prediction, single: Sequence[Change], model: Any) -> Change | None:
    """Return the change, or the pair of changes, that fits and takes the least time; None if there is none.

    Pairs are tried in the order of the time that their two changes take one by one. A change that trains other weights
    is returned only if no other change fits, and no pair of others.
    """
    limit = room(taken.cfg)
    best = cheapest_alone(single, taken.cfg, asked, limit)
    if best is not None and not trains_otherwise(best.words):
        return best
    base = changes.seconds(asked) or math.inf
    slower = {each.words: took / base for each in single if (took := changes.seconds(each.prediction)) is not None}

    def guess(words: Words) -> tuple[bool, bool, float]:
        added = math.prod(slower.get(each, 2.0) for each in words)
        return any(map(trains_otherwise, words)), any(map(changes.offloads, words)), added

    options = pairs(taken.cfg, engines=taken.chosen is None, short=asked.short)
    together = sorted(options, key=guess)
    alike = [words for words in together if not any(map(trains_otherwise, words))]
    at_a_time = len(os.sched_getaffinity(0))

    def first_of(several: Sequence[Words]) -> Change | None:
        for start in range(0, len(several), at_a_time):
            some = several[start : start + at_a_time]
            results = tried([options[words] for words in some], model, limit)
            both = [Change.of(" ".join(words), result) for words, result in zip(some, results, strict=True)]
            if (fitting := cheapest_alone(both, taken.cfg, asked, limit)) is not None:
                return fitting
        return None

    return first_of(alike) or best or first_of(together[len(alike) :])


def otherwise(single: Sequence[Change], limit: int) -> str:
    """Return a sentence on a single change that fits and trains other weights; none if there is none."""
    fitting = [each for each in single if trains_otherwise(each.words) and each.fits(limit)]
    return "".join(in_another_training(each) for each in fitting)


def in_another_training(change: Change) -> str:
    assert change.prediction is not None
    return f"With {change.words} it would fit ({size(change.prediction.peak.bytes)}), but {OTHERWISE}. "


def changes_of(taken: Taken, asked: Prediction, model: Any, rank: int | None = None) -> Calls[list[Change]]:
    """Predict each single change of a run whose prediction is `asked`."""
    options = list(singles(taken.cfg, engines=taken.chosen is None, short=asked.short))
    results = yield [attempt(cfg, model, room(taken.cfg), rank) for _, cfg in options]
    return [Change.of(words, result) for (words, _), result in zip(options, results, strict=True)]


def tried(options: Sequence[Config], model: Any, limit: float = math.inf) -> list[Result]:
    """Predict configurations side by side; for one that fails, return the error."""
    return at_once([attempt(cfg, model, limit) for cfg in options])


def attempt(cfg: Config, model: Any, limit: float, rank: int | None = None) -> Calls[Result]:
    """Predict a configuration, or return the error.

    A build that alone needs more bytes than `limit` may be the whole answer. `rank` is the one that holds most if it is
    not given.
    """
    try:
        cfg = yield from laid_out(cfg, model)
        return (yield from predict(cfg, model, rank, limit=limit))
    except Exception as error:
        return error


def laid_out(cfg: Config, model: Any) -> Calls[Config]:
    """Replace parallel.layout=auto by the layout that it takes."""
    if cfg.parallel.layout is not LayoutName.auto:
        return cfg
    choice = yield from choosing(cfg, heads_in(model.to_dict()))
    return with_layout(cfg, choice)


def whole(result: Result) -> Found:
    if isinstance(result, Exception):
        raise result
    return result
