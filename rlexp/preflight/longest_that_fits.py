"""Find the longest sequence that fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlexp.base.byte_counts import GIB
from rlexp.config.checks.micro_batches import longest_sample
from rlexp.config.schema import Config, with_values
from rlexp.preflight.children import Calls
from rlexp.preflight.predict import Found, Prediction, predict_again, predict_fuller
from rlexp.preflight.rehearsal.log import ACTIVATIONS, TEMPORARIES, VLLM
from rlexp.preflight.vllm import room

STEP = 1024  # tokens of a rank: a length that is closer to the longest is not looked for
CLOSE = 0.99  # of the room: a length that fills as much is long enough
TRIES = 6
FIRST = 4096  # tokens for each rank of a ring, where nothing is known yet
ANSWERS = 1024  # tokens of each answer of a pair that shares its prompt
LEAP = 16  # times the longest known length, at most: while a peak does not depend on the length, any one seems to fit
LONGEST = 1 << 26  # tokens; a rehearsal has the tokens of the whole batch on the host, as a real rank has


@dataclass
class Search:
    """Peaks of all phases by length, and the lengths between which the longest one lies."""

    limit: int  # bytes
    granule: int  # tokens
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)
    shorter: int = 0  # tokens that are too few: a length has more

    def peak(self, length: int) -> int:
        return max(self.peaks[length].values())

    @property
    def best(self) -> int:
        """The longest known length that fits; 0 if none is known."""
        return max((length for length in self.peaks if self.peak(length) <= self.limit), default=0)

    @property
    def above(self) -> int | None:
        return min((length for length in self.peaks if length > self.best), default=None)

    @property
    def done(self) -> bool:
        best, above = self.best, self.above
        close = best > 0 and self.peak(best) >= CLOSE * self.limit
        return close or best >= LONGEST or (above is not None and above - max(best, self.floor) <= self.granule)

    @property
    def floor(self) -> int:
        """The longest length that `shorter` leaves out."""
        return self.shorter // self.granule * self.granule

    def reach(self) -> tuple[float, float] | None:
        """Return where the first of the phases seems to reach the limit, and the bytes that a token adds to it.

        A phase grows along a line, or does not grow at first. So a line through two lengths meets the limit too late
        rather than too early, unless the limit lies between them: there is no better guess than the earliest.
        """
        near = [each for each in sorted(self.peaks) if each <= self.best][-2:]
        near += [each for each in sorted(self.peaks) if each > self.best][:2]
        crossings = []
        for phase in self.peaks[near[0]]:
            lines = [line for pair in pairwise(near) if (line := self._meets(phase, *pair)) is not None]
            beyond = [line for line in lines if not line[2]]
            if lines:
                crossings.append(min(beyond or lines)[:2])
        return min(crossings, default=None)

    def _meets(self, phase: str, low: int, high: int) -> tuple[float, float, bool] | None:
        """Return where the line of a phase meets the limit, its slope, and whether that is between the two lengths."""
        first, second = self.peaks[low].get(phase, 0), self.peaks[high].get(phase, 0)
        slope = (second - first) / (high - low)
        if slope <= 0:
            return None
        meets = low + (self.limit - first) / slope
        return meets, slope, low < meets < high

    def guess(self, slope: float) -> int:
        """Return where the limit seems to be, between what is known. `slope` helps where one length is known."""
        best, above = self.best, self.above
        near = min(self.peaks, key=lambda length: abs(self.peak(length) - self.limit))
        leap = max(LEAP * max(self.peaks), FIRST * self.granule // STEP)
        if (reached := self.reach()) is not None:
            tokens = reached[0]
        else:
            tokens = near + (self.limit - self.peak(near)) / slope if slope > 0 else leap
        least = max(best, self.floor) + self.granule
        inside = max(int(min(tokens, leap, LONGEST)) // self.granule * self.granule, least)
        return inside if above is None else min(inside, above - self.granule)


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


def with_length(cfg: Config, length: int) -> Config:
    """Change the length of prompt and answer together. An answer keeps its own, unless no prompt had room then."""
    answer, tokens = min(cfg.rollout.max_new_tokens, length - 1), cfg.rollout.micro_batch_tokens
    at_once = None if tokens is None else max(tokens, length)
    longer = with_values(cfg, "rollout", max_new_tokens=answer, micro_batch_tokens=at_once)
    longer = with_values(longer, "data", max_length=length)
    if (given := cfg.train.max_tokens_per_micro_batch) is None:
        return longer
    return with_values(longer, "train", max_tokens_per_micro_batch=max(given, longest_sample(longer)))


def fit_sharing(cfg: Config, model: Any, alone: Longest, asked: Found) -> Calls[Longest]:
    """Find the longest pair whose answers share a prompt, and have `ANSWERS` tokens each. `alone` is the longest that
    shares nothing."""
    one = with_values(cfg, "train", micro_batch_size=1, max_tokens_per_micro_batch=None,
                      grad_acc=-(-cfg.train.batch_size // cfg.parallel.dp_size))  # fmt: skip
    granule = STEP * cfg.parallel.ring_size
    tokens = max(2 * (alone.tokens or cfg.data.max_length) - ANSWERS, granule + ANSWERS)  # as many in all
    first = with_length(one, -(-tokens // granule) * granule)
    outcome = yield from predict_fuller(first, model, asked.prediction.rank, asked.grows, room(cfg), ANSWERS)
    return (yield from fit_from(first, model, outcome, alone.slope / 2, ANSWERS))


def fit_from(cfg: Config, model: Any, outcome: Found, slope: float = 0.0, answers: int | None = None) -> Calls[Longest]:
    """Search from the configuration's own length, whose prediction is known. `slope` guesses the bytes that a token
    adds."""
    length = cfg.data.max_length
    search = Search(room(cfg), STEP * cfg.parallel.ring_size, shorter=answers or 0)
    if not slope and length >= FIRST * cfg.parallel.ring_size:
        peak = outcome.prediction.peak  # at most so many bytes a token: some of them do not depend on the length
        slope = (peak.by_kind[ACTIVATIONS] + peak.by_kind[TEMPORARIES]) / length
    predictions: dict[int, Prediction] = {}
    for _ in range(1 + TRIES):
        predictions[length] = outcome.prediction
        search.peaks[length] = {phase: peak.bytes for phase, peak in outcome.prediction.peaks.items()}
        if (vllm := outcome.prediction.vllm) is not None and not vllm.auto:  # an answer must fit into the share
            search.peaks[length][VLLM] = search.limit * vllm.holds.least // vllm.holds.bytes
        if search.done or len(predictions) > TRIES:
            break
        length = search.guess(slope)
        outcome = yield from predict_again(with_length(cfg, length), model, outcome, search.limit, answers)
    known = predictions[search.best or min(predictions)].peak
    grows = search.reach()
    return Longest(search.best, known.bytes, grows[1] if grows else slope, known.phase, search.done)
