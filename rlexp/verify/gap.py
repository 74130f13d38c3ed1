"""Why the model that generates and the model that is trained give tokens different log-probabilities.

`assumed.py` says which log-probabilities the tokens would have under each assumption. Here these are put beside those
that the samples carry, and the assumption that they agree with is named: rounding alone, or a cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlexp.config.schema import Config
from rlexp.config.schema.models import Precision
from rlexp.launch.joining import RankSpec
from rlexp.verify import rollout_rules as rules
from rlexp.verify.assumed import Assumed
from rlexp.verify.recording import Array, DrawnSample

NORMAL, CAUSE, UNEXPLAINED = "normal", "cause", "unexplained"
GENERATES, TRAINED = "the model that generates", "the model that is trained"
MOST = 4096  # tokens of answers that the assumptions are tried on
# Two right programs round differently: measured 0.4 to 1.3 of the plain model's own rounding on average, and up to 1.7
# of its largest (docs/verify.md). A defect makes a difference to most tokens, or a large one to a few.
MEANS, LARGEST = 3.0, 5.0
NEARER = 0.8  # of the distance to what is configured: then another assumption is the nearer one
LEAST = 3.0  # times float32's rounding: less is no effect, since the assumptions are computed in float32
HARMLESS = ("all positions + 1", "padding counted")  # where they have no effect, only distances count in the model
OF_ROUNDING = "weights in bf16"  # a part of rounding to bf16


@dataclass(frozen=True)
class Rounding:
    """How far the plain model in one precision lies from itself in float64: on average, and at most."""

    mean: float
    largest: float

    def explains(self, mean: float, largest: float) -> bool:
        return mean <= MEANS * self.mean and largest <= LARGEST * self.largest


@dataclass(frozen=True)
class Tried:
    """An assumption beside the log-probabilities that were given."""

    name: str
    words: str
    mean: float  # the distance between the two, over the tokens of which it says something
    median: float
    largest: float
    effect: float  # by how much it differs from what is configured, on average


@dataclass(frozen=True)
class Parting:
    """The first token whose two log-probabilities part."""

    place: int  # its sample's place in the rollout
    at: int  # in the answer
    got: float
    expected: float
    parting: int  # tokens that part, of
    of: int


@dataclass(frozen=True)
class Side:
    """What is known of the log-probabilities of one of the two models."""

    who: str
    verdict: str
    cause: str | None  # the assumption that explains it, by its name
    words: str
    tried: Sequence[Tried] = ()  # the nearest first
    blind: Sequence[str] = ()  # assumptions that change less than rounding does
    first: Parting | None = None  # the first token that nothing explains

    @property
    def normal(self) -> bool:
        return self.verdict == NORMAL


@dataclass(frozen=True)
class Gap:
    """How far the two models lie apart in a rollout, and why."""

    rollout: int  # counted from 1
    samples: int
    tokens: int
    compared: int  # tokens that the assumptions were tried on
    precision: str  # that the generator computes in
    values: dict[str, float]  # as the run logs them
    rounding: dict[str, Rounding]
    of_generating: float  # means: how far each side lies from the plain model,
    of_scoring: float
    of_age: float  # and how far training has moved the weights in between
    sides: Sequence[Side]  # of the model that generates, and of the model that is trained
    strayed: int  # tokens that their random numbers do not choose
    doubtful: int
    prompts: Sequence[str]  # prompts that are not what the reference tokenizes, in words

    @property
    def normal(self) -> bool:
        return not self.prompts and not self.strayed and all(side.normal for side in self.sides)


def gap_rank(
    _spec: RankSpec,
    cfg: Config,
    samples: Sequence[DrawnSample],
    number: int,
    ran: Path,
    prompts: Mapping[int, DrawnSample],
) -> Gap:
    return diagnosed(cfg, samples, number, ran, prompts)


def diagnosed(
    cfg: Config, samples: Sequence[DrawnSample], number: int, ran: Path, prompts: Mapping[int, DrawnSample]
) -> Gap:
    """Say how far the two models lie apart in the samples of rollout `number`, and why.

    `ran` has the run's weights after each step. `prompts` are those that native code has taken, by their places in the
    data set.
    """
    old = [np.asarray(each.old) for each in samples]
    some = samples[:: max(1, sum(map(len, old)) // MOST)]  # evenly chosen
    given, scored = (np.concatenate([getattr(each, name) for each in some]).astype(np.float64)
                     for name in ("behaviour", "old"))  # fmt: skip
    assumed = Assumed(cfg, some, number, ran)
    exact, coarse, plain = (assumed.logps(assumed.configured(assumed.drew, dtype))
                            for dtype in (torch.float64, torch.bfloat16, torch.float32))  # fmt: skip
    rounding = {"fp32": Rounding(*_apart(plain, exact)), "bf16": Rounding(*_apart(coarse, exact))}
    # vLLM has no float64, in which float32's rounding is the least that is measured too.
    precision = "fp32" if cfg.train.precision is Precision.fp64 else cfg.train.precision.value
    judge = Judge(assumed, rounding, precision)
    now = plain if assumed.scored == assumed.drew else assumed.logps(assumed.configured(assumed.scored))
    generates = judge.side(GENERATES, given, assumed.drew)
    trained = Side(TRAINED, NORMAL, None, "its log-probabilities are as configured, up to rounding")
    if not judge.least.explains(*_apart(scored, now)):
        trained = judge.side(TRAINED, scored, assumed.scored)
    strayed, doubtful = assumed.strayed(LARGEST * judge.least.largest) if generates.normal else (0, 0)
    return Gap(
        rollout=number + 1, samples=len(samples), tokens=sum(map(len, old)), compared=len(given), precision=precision,
        values=rules.of_gap(old, [each.behaviour for each in samples]), rounding=rounding,
        of_generating=_apart(given, plain)[0], of_scoring=_apart(scored, now)[0], of_age=_apart(now, plain)[0],
        sides=[generates, trained], strayed=strayed, doubtful=doubtful, prompts=list(_other_prompts(samples, prompts)),
    )  # fmt: skip


def _apart(one: Array, other: Array) -> tuple[float, float]:
    """Return the mean and the largest difference, over the tokens of which `other` says something."""
    gaps = np.abs(one - other)[~np.isnan(other)]
    return (float(gaps.mean()), float(gaps.max())) if len(gaps) else (np.inf, np.inf)


def _other_prompts(samples: Sequence[DrawnSample], prompts: Mapping[int, DrawnSample]) -> Iterator[str]:
    """Say which prompts are not those that native code has taken."""
    for sample in samples:
        got, wanted = sample.prompt, prompts.get(sample.index, sample).prompt
        if np.array_equal(got, wanted):
            continue
        what = f"sample {sample.place}: its prompt has {len(got)} tokens, the reference's {len(wanted)}"
        if np.array_equal(got[1:], wanted):
            yield f"{what}: it has a {got[0]} too many at its beginning"
        elif np.array_equal(got, wanted[1:]):
            yield f"{what}: it lacks the first, {wanted[0]}"
        else:
            length = min(len(got), len(wanted))
            at = next((n for n in range(length) if got[n] != wanted[n]), length)
            pair = " and ".join(str(each[at]) if at < len(each) else "none" for each in (got, wanted))
            yield f"{what}: they part at token {at} ({pair})"


@dataclass(frozen=True)
class Judge:
    """Compares given log-probabilities with those of all assumptions."""

    assumed: Assumed
    rounding: dict[str, Rounding]
    precision: str

    @property
    def least(self) -> Rounding:
        return self.rounding[self.precision]

    def side(self, who: str, given: Array, step: int) -> Side:
        """Judge log-probabilities that the weights after a step must have given."""
        meant, *every = self._tried(given, step)
        seen = max(self.least.mean, LEAST * self.rounding["fp32"].mean)
        ordered = sorted([meant, *(each for each in every if each.effect >= seen)], key=lambda each: each.mean)
        blind = [each.name for each in every if each.effect < seen and each.name not in HARMLESS]
        nearest = next(each for each in ordered if each.name != OF_ROUNDING)
        # Coarser rounding may explain the nearest: it moves most tokens, and not a few.
        coarser = [nearest] if nearest.median > self.least.mean else []
        for precision, candidates in ((self.precision, ordered), ("bf16", coarser)):
            verdict = self._by_rounding(precision, meant, candidates, ordered)
            if verdict is not None:
                return Side(who, *verdict, ordered, blind)
        words = (
            f"none of the tried causes explains its log-probabilities: they differ from what is configured by "
            f"{meant.mean:.2g} on average. Nearest, by {ordered[0].mean:.2g}, are {ordered[0].words}"
        )
        return Side(who, UNEXPLAINED, None, words, ordered, blind, self._first(given, step))

    def _tried(self, given: Array, step: int) -> Iterator[Tried]:
        meant = None
        for each in self.assumed.all(step):
            if (each.name, self.precision) == (OF_ROUNDING, "bf16"):
                continue
            logps = self.assumed.logps(each)
            meant = logps if meant is None else meant  # what is configured comes first
            mean, largest = _apart(given, logps)
            median = float(np.nanmedian(np.abs(given - logps)))
            yield Tried(each.name, each.words, mean, median, largest, _apart(meant, logps)[0])

    def _by_rounding(
        self, precision: str, meant: Tried, candidates: Sequence[Tried], ordered: Sequence[Tried]
    ) -> tuple[str, str | None, str] | None:
        """Return verdict, cause and words by the nearest candidate that agrees up to rounding: what is configured,
        unless another is much nearer."""
        alone = self.rounding[precision]
        fitting = [each for each in candidates if alone.explains(each.mean, each.largest)]
        if not fitting:
            return None
        best = meant if meant in fitting and fitting[0].mean >= NEARER * meant.mean else fitting[0]
        by = f"{best.mean:.2g} on average (at most {best.largest:.2g})"
        rounds = f"rounding to {precision} alone makes {alone.mean:.2g} (at most {alone.largest:.2g})"
        if best is meant and precision == self.precision:
            return NORMAL, None, f"its log-probabilities are as configured: they differ by {by}, and {rounds}"
        if best is meant:
            return CAUSE, f"rounding of {precision}", (
                f"it computes more coarsely than {self.precision}: its log-probabilities differ by {by} from what is "
                f"configured, and {rounds}"
            )  # fmt: skip
        also = [each.words for each in ordered if each is not best and each.mean * NEARER <= best.mean]
        return CAUSE, best.name, (
            f"its log-probabilities are {best.words}: they differ from these by {by}, where {rounds}; from what is "
            f"configured by {meant.mean:.2g} (at most {meant.largest:.2g})"
            + (f". As near are {' and '.join(also)}" if also else "")
        )  # fmt: skip

    def _first(self, given: Array, step: int) -> Parting:
        """Return the first token that rounding does not explain."""
        meant = self.assumed.logps(self.assumed.configured(step))
        apart = np.abs(given - meant)
        parting = apart > LARGEST * self.least.largest
        if not parting.any():
            parting = apart == apart.max()
        first = int(parting.argmax())
        places = [(sample.place, at) for sample in self.assumed.samples for at in range(len(sample.answer))]
        return Parting(*places[first], float(given[first]), float(meant[first]), int(parting.sum()), len(given))
