"""Find the longest sequence that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rlexp.config.schema import Config
from rlexp.rehearse.children import Calls
from rlexp.rehearse.log import ACTIVATIONS, TEMPORARIES
from rlexp.rehearse.predict import GIB, Found, Prediction, predict, predict_again

STEP = 1024  # tokens: lengths are multiples of it for each rank of a ring
CLOSE = 0.99  # of the room: a length that fills as much is long enough
TRIES = 6
FIRST = 4096  # tokens for each rank of a ring, where nothing is known yet
LEAP = 16  # times the longest known length, at most: while a peak does not depend on the length, any one seems to fit
LONGEST = 1 << 26  # tokens; a rehearsal has the tokens of the whole batch on the host, as a real rank has


@dataclass
class Search:
    """Peaks by length, and the lengths between which the longest one lies."""

    limit: int  # bytes
    granule: int  # tokens
    peaks: dict[int, int] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The longest known length that fits; 0 if none is known."""
        return max((length for length, peak in self.peaks.items() if peak <= self.limit), default=0)

    @property
    def above(self) -> int | None:
        return min((length for length in self.peaks if length > self.best), default=None)

    @property
    def done(self) -> bool:
        best, above = self.best, self.above
        close = best > 0 and self.peaks[best] >= CLOSE * self.limit
        return close or best >= LONGEST or (above is not None and above - best <= self.granule)

    def slope(self) -> float:
        """Return the bytes that a token adds, by the two longest known lengths."""
        if len(self.peaks) < 2:
            return 0.0
        low, high = sorted(self.peaks)[-2:]
        return (self.peaks[high] - self.peaks[low]) / (high - low)

    def guess(self, slope: float) -> int:
        """Return where a line through the nearest known length reaches the limit, between what is known."""
        near = min(self.peaks, key=lambda length: abs(self.peaks[length] - self.limit))
        start = FIRST * self.granule // STEP
        tokens = near + (self.limit - self.peaks[near]) / slope if slope > 0 else start if near < start else near / 4
        inside = max(int(tokens) // self.granule * self.granule, self.best + self.granule)
        if self.above is not None:
            inside = min(inside, self.above - self.granule)
        leap = max(LEAP * max(self.peaks) // self.granule * self.granule, start)
        return min(inside, leap, LONGEST)


@dataclass(frozen=True)
class Longest:
    """The longest sequence found that fits, with its peak in bytes; none if not even a short one does."""

    tokens: int
    peak: int
    slope: float  # bytes that a token adds to the peak
    phase: str = ""  # of the peak
    exact: bool = True  # else the search ended before it came as close as it should

    def plain(self) -> dict[str, float]:
        return {"tokens": self.tokens, "peak_gib": round(self.peak / GIB, 2)}


def room(cfg: Config) -> int:
    """Return the bytes of a device that tensors may take."""
    return int((cfg.hardware.memory_gib - cfg.hardware.reserve_gib) * GIB)


def with_length(cfg: Config, length: int) -> Config:
    """Change the length of prompt and answer together. An answer keeps its own, unless no prompt had room then."""
    rollout, tokens = cfg.rollout, cfg.rollout.micro_batch_tokens
    rollout = dataclasses.replace(
        rollout,
        max_new_tokens=min(rollout.max_new_tokens, length - 1),
        micro_batch_tokens=None if tokens is None else max(tokens, length),
    )
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, max_length=length), rollout=rollout)


def predict_and_fit(cfg: Config, model: Any, slope: float = 0.0, found: Found | None = None) -> Calls:
    """Predict a configuration at its own length, and find the longest one that fits. A task of `children.at_once`.

    `slope` is a guess of the bytes that a token adds, and `found` the prediction, if they are known.
    """
    found = found or (yield from predict(cfg, model))
    longest: Longest = yield from _longest(cfg, model, found, slope)
    return found, longest


def fit_like(cfg: Config, model: Any, slope: float, asked: Found) -> Calls:
    """Find the longest sequence that fits, for another ring than the one asked; `slope` is a guess of the bytes that a
    token adds. A task of `children.at_once`.
    """
    first = yield from predict(cfg, model, asked.prediction.rank, asked.grows)
    longest: Longest = yield from _longest(cfg, model, first, slope)
    return longest


def _longest(cfg: Config, model: Any, found: Found, slope: float) -> Calls:
    """Search from the configuration's own length, whose prediction is known."""
    limit, ring, peak = room(cfg), cfg.parallel.ring_size, found.prediction.peak
    search = Search(limit, STEP * ring, {cfg.data.max_length: peak.bytes})
    phases = {cfg.data.max_length: peak.phase}
    for _ in range(TRIES):
        if search.done:
            break
        length = search.guess(slope)
        if length in search.peaks:
            break
        found = yield from predict_again(with_length(cfg, length), model, found)
        peak = found.prediction.peak
        search.peaks[length], phases[length] = peak.bytes, peak.phase
        if len(search.peaks) == 2 and not slope:
            slope = _steepness(found.prediction, length)
        else:  # a short sequence's peak may not grow yet: a line through two such would lead too far
            slope = search.slope() if search.above else max(slope, search.slope())
    known = search.best or min(search.peaks)
    return Longest(search.best, search.peaks[known], slope or search.slope(), phases[known], search.done)


def _steepness(prediction: Prediction, length: int) -> float:
    """Return the bytes that a token seems to add: a short sequence's peak may be elsewhere than a long one's."""
    return sum(prediction.peak.by_kind[kind] for kind in (ACTIVATIONS, TEMPORARIES)) / length
