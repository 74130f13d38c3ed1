"""Find the longest sequence that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rlexp.config.schema import Config
from rlexp.rehearse.children import Calls
from rlexp.rehearse.log import Log
from rlexp.rehearse.predict import GIB, Peak, Prediction, Slopes, predict, predict_again

STEP = 1024  # tokens: lengths are multiples of it for each rank of a ring
CLOSE = 0.99  # of the room: a length that fills as much is long enough
TRIES = 6
LONGEST = 1 << 28  # tokens


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
        tokens = near + (self.limit - self.peaks[near]) / slope if slope > 0 else near * 4
        inside = max(int(tokens) // self.granule * self.granule, self.best + self.granule)
        if self.above is not None:
            inside = min(inside, self.above - self.granule)
        return min(inside, LONGEST)


@dataclass(frozen=True)
class Longest:
    """The longest sequence found that fits, with its peak in bytes; none if not even a short one does."""

    tokens: int
    peak: int
    slope: float  # bytes that a token adds to the peak
    phase: str = ""  # of the peak

    def plain(self) -> dict[str, float]:
        return {"tokens": self.tokens, "peak_gib": round(self.peak / GIB, 2)}


def room(cfg: Config) -> int:
    """Return the bytes of a device that tensors may take."""
    return int((cfg.hardware.memory_gib - cfg.hardware.reserve_gib) * GIB)


def with_length(cfg: Config, length: int) -> Config:
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, max_length=length))


def predict_once(cfg: Config, model: Any) -> Calls:
    """Predict a configuration at its own length. A task of `children.at_once`."""
    prediction: Prediction
    prediction, *_ = yield from predict(cfg, model)
    return prediction


@dataclass(frozen=True)
class Found:
    prediction: Prediction
    longest: Longest
    slopes: Slopes | None
    log: Log  # of the fewest layers


def predict_and_fit(cfg: Config, model: Any, slope: float = 0.0) -> Calls:
    """Predict a configuration at its own length, and find the longest one that fits. A task of `children.at_once`.

    `slope` is a guess of the bytes that a token adds, if there is one.
    """
    prediction, slopes, log = yield from predict(cfg, model)
    longest = yield from _longest(cfg, model, prediction.peak, slopes, slope)
    return Found(prediction, longest, slopes, log)


def fit_like(cfg: Config, model: Any, slope: float, slopes: Slopes | None) -> Calls:
    """Find the longest sequence that fits, for another ring of a configuration whose slopes are known.

    `slope` is a guess of the bytes that a token adds. A task of `children.at_once`.
    """
    first = yield from _peak(cfg, model, slopes)
    longest: Longest = yield from _longest(cfg, model, first, slopes, slope)
    return longest


def _longest(cfg: Config, model: Any, first: Peak, slopes: Slopes | None, slope: float) -> Calls:
    """Search from the configuration's own length, whose peak is known."""
    search = Search(room(cfg), STEP * cfg.parallel.ring_size, {cfg.data.max_length: first.bytes})
    phases = {cfg.data.max_length: first.phase}
    for _ in range(TRIES):
        if search.done:
            break
        length = search.guess(search.slope() or slope)
        if length in search.peaks:
            break
        peak = yield from _peak(with_length(cfg, length), model, slopes)
        search.peaks[length], phases[length] = peak.bytes, peak.phase
    known = search.best or min(search.peaks)
    return Longest(search.best, search.peaks[known], search.slope() or slope, phases[known])


def _peak(cfg: Config, model: Any, slopes: Slopes | None) -> Calls:
    prediction: Prediction = yield from predict_again(cfg, model, slopes)
    return prediction.peak
