"""Why the model that generates and the model that is trained give tokens different log-probabilities.

`reference/assumed.py` says which log-probabilities the tokens would have under each assumption. Here these are put
beside those that the samples carry, and the assumption that they agree with is named: rounding alone, or a cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.models import Precision
from rlexp.launch.joining import RankSpec
from rlexp.verify import rollout_rules as rules
from rlexp.verify.assumed import Assumed, Said, other_prompts
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
class Token:
    """A token whose two log-probabilities part."""

    place: int  # its sample's place in the rollout
    at: int  # in the answer
    got: float
    expected: float
    parting: int  # tokens that part, of
    of: int


@dataclass(frozen=True)
class Side:
    """What is found of the log-probabilities of one of the two models."""

    who: str
    verdict: str
    cause: str | None  # the assumption that explains it, by its name
    words: str
    tried: Sequence[Tried]  # the nearest first
    blind: Sequence[str]  # assumptions that change less than rounding does
    first: Token | None = None  # the first token that nothing explains


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
    sides: Sequence[Side]
    strayed: int = 0  # tokens that their random numbers do not choose
    doubtful: int = 0
    prompts: Sequence[str] = field(default=())  # prompts that are not what the reference tokenizes, in words

    @property
    def normal(self) -> bool:
        return not self.prompts and not self.strayed and all(side.verdict == NORMAL for side in self.sides)


def computing_in(precision: Precision) -> str:
    """The precision that answers are generated in: vLLM has no float64, in which float32's rounding is the least that
    is measured too."""
    return {Precision.fp64: "fp32"}.get(precision, precision.value)


def diagnosed(
    cfg: Config, samples: Sequence[DrawnSample], number: int, ran: Path | None, prompts: Mapping[int, DrawnSample]
) -> Gap:
    """Say how far the two models lie apart in the samples of rollout `number`, and why.

    `ran` has the run's weights after each step; without it all weights are those that training starts from. `prompts`
    are those that native code has taken, by their places in the data set.
    """
    old = [_known(sample.old) for sample in samples]
    values = rules.of_gap(old, [sample.behaviour for sample in samples])
    some = _some(samples)
    assumed = Assumed(cfg, some, number, ran)
    said = assumed.configured()
    exact, plain = flat(said["fp64"]), flat(said["fp32"])
    rounding = {name: _rounding(flat(said[name]), exact) for name in ("fp32", "bf16")}
    given, scored = (flat([each.astype(np.float64) for each in of])
                     for of in ([s.behaviour for s in some], [_known(s.old) for s in some]))  # fmt: skip
    now = plain if assumed.scored == assumed.drew else flat(assumed.now())
    precision = computing_in(cfg.train.precision)
    judge = Judge(some, rounding, precision)
    sides = [judge.side(GENERATES, given, assumed.all(assumed.drew))]
    if not rounding[precision].explains(*_apart(scored, now)):  # else it is what it must be
        sides.append(judge.side(TRAINED, scored, assumed.all(assumed.scored)))
    else:
        sides.append(Side(TRAINED, NORMAL, None, "its log-probabilities are as configured, up to rounding", (), ()))
    strayed, doubtful = _chosen(assumed, rounding[precision]) if sides[0].verdict == NORMAL else (0, 0)
    return Gap(
        rollout=number + 1, samples=len(samples), tokens=sum(map(len, old)), compared=len(given), precision=precision,
        values=values, rounding=rounding, of_generating=_apart(given, plain)[0], of_scoring=_apart(scored, now)[0],
        of_age=_apart(now, plain)[0], sides=sides, strayed=strayed, doubtful=doubtful,
        prompts=list(_prompts(samples, prompts)),
    )  # fmt: skip


def gap_rank(
    _spec: RankSpec,
    cfg: Config,
    samples: Sequence[DrawnSample],
    number: int,
    ran: Path,
    prompts: Mapping[int, DrawnSample],
) -> Gap:
    return diagnosed(cfg, samples, number, ran, prompts)


def _known(values: Array | None) -> Array:
    assert values is not None
    return values


def _some(samples: Sequence[DrawnSample]) -> list[DrawnSample]:
    """Return evenly chosen samples that have `MOST` tokens, or little more."""
    stride = max(1, sum(len(sample.answer) for sample in samples) // MOST)
    return list(samples[::stride])


def flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate(arrays)


def _apart(one: Array, other: Array) -> tuple[float, float]:
    gaps = np.abs(one - other)
    gaps = gaps[~np.isnan(other)]
    return (float(gaps.mean()), float(gaps.max())) if len(gaps) else (np.inf, np.inf)


def _tried(said: Said, given: Array, meant: Array) -> Tried:
    logps = flat(said.logps)
    mean, largest = _apart(given, logps)
    median = float(np.nanmedian(np.abs(given - logps)))
    return Tried(said.name, said.words, mean, median, largest, _apart(meant, logps)[0])


def _rounding(rounded: Array, exact: Array) -> Rounding:
    return Rounding(*_apart(rounded, exact))


def _chosen(assumed: Assumed, rounding: Rounding) -> tuple[int, int]:
    """Count the tokens that their numbers do not choose: outside their part by more than rounding moves a border."""
    off = LARGEST * rounding.largest
    apart, doubtful = assumed.strayed(off)
    return int((flat(apart) > np.expm1(2 * off)).sum()), doubtful


def _prompts(samples: Sequence[DrawnSample], prompts: Mapping[int, DrawnSample]) -> Iterator[str]:
    """Say which prompts are not those that native code has taken."""
    for place, (got, wanted) in other_prompts(samples, prompts).items():
        length = min(len(got), len(wanted))
        at = next((n for n in range(length) if got[n] != wanted[n]), length)
        what = f"sample {place}: its prompt has {len(got)} tokens, the reference's {len(wanted)}"
        if np.array_equal(got[1:], wanted):
            yield f"{what}: it has a {got[0]} too many at its beginning"
        elif np.array_equal(got, wanted[1:]):
            yield f"{what}: it lacks the first, {wanted[0]}"
        else:
            pair = " and ".join(str(each[at]) if at < len(each) else "none" for each in (got, wanted))
            yield f"{what}: they part at token {at} ({pair})"


@dataclass(frozen=True)
class Judge:
    """Compares given log-probabilities with those of all assumptions."""

    samples: Sequence[DrawnSample]
    rounding: dict[str, Rounding]
    precision: str

    @property
    def least(self) -> Rounding:
        return self.rounding[self.precision]

    def side(self, who: str, given: Array, said: Iterable[Said]) -> Side:
        every = [each for each in said if (each.name, self.precision) != (OF_ROUNDING, "bf16")]
        meant = flat(every[0].logps)  # what is configured comes first
        tried = [_tried(each, given, meant) for each in every]
        configured, others = tried[0], tried[1:]
        seen = max(self.least.mean, LEAST * self.rounding["fp32"].mean)
        telling = [each for each in others if each.effect >= seen]
        blind = [each.name for each in others if each.effect < seen and each.name not in HARMLESS]
        ordered = sorted([configured, *telling], key=lambda each: each.mean)
        for precision in dict.fromkeys((self.precision, "bf16")):
            candidates = ordered if precision == self.precision else self._coarser(ordered)
            found = self._found(configured, candidates, self.rounding[precision])
            if found is not None:
                normal = found is configured and precision == self.precision
                cause = None if normal else f"rounding of {precision}" if found is configured else found.name
                words = self._words(found, configured, ordered, precision)
                return Side(who, NORMAL if normal else CAUSE, cause, words, ordered, blind)
        words = (
            f"none of the tried causes explains its log-probabilities: they differ from what is configured by "
            f"{configured.mean:.2g} on average. Nearest, by {ordered[0].mean:.2g}, are {ordered[0].words}"
        )
        return Side(who, UNEXPLAINED, None, words, ordered, blind, self._first(given, meant))

    def _coarser(self, ordered: Sequence[Tried]) -> list[Tried]:
        """Return the nearest, if coarser rounding may explain it: that moves most tokens, and not a few."""
        nearest = next(each for each in ordered if each.name != OF_ROUNDING)
        return [nearest] if nearest.median > self.least.mean else []

    def _found(self, configured: Tried, ordered: Sequence[Tried], rounding: Rounding) -> Tried | None:
        """Return the nearest of those that agree up to rounding; what is configured, unless another is much nearer."""
        fitting = [each for each in ordered if rounding.explains(each.mean, each.largest)]
        if configured in fitting and fitting[0].mean >= NEARER * configured.mean:
            return configured
        return fitting[0] if fitting else None

    def _words(self, found: Tried, configured: Tried, ordered: Sequence[Tried], precision: str) -> str:
        by = f"{found.mean:.2g} on average (at most {found.largest:.2g})"
        alone = self.rounding[precision]
        rounds = f"rounding to {precision} alone makes {alone.mean:.2g} (at most {alone.largest:.2g})"
        if found is configured and precision == self.precision:
            return f"its log-probabilities are as configured: they differ by {by}, and {rounds}"
        if found is configured:
            return (
                f"it computes more coarsely than {self.precision}: its log-probabilities differ by {by} from what is "
                f"configured, and {rounds}"
            )
        also = [each.words for each in ordered if each is not found and each.mean * NEARER <= found.mean]
        return (
            f"its log-probabilities are {found.words}: they differ from these by {by}, where {rounds}; from what is "
            f"configured by {configured.mean:.2g} (at most {configured.largest:.2g})"
            + (f". As near are {' and '.join(also)}" if also else "")
        )

    def _first(self, given: Array, meant: Array) -> Token:
        """Return the first token that rounding does not explain."""
        apart = np.abs(given - meant)
        parting = apart > LARGEST * self.least.largest
        if not parting.any():
            parting = apart == apart.max()
        at = int(parting.argmax())
        lengths = np.cumsum([len(sample.answer) for sample in self.samples])
        sample = int(np.searchsorted(lengths, at, side="right"))
        begins = int(lengths[sample]) - len(self.samples[sample].answer)
        found = float(given[at]), float(meant[at])
        return Token(self.samples[sample].place, at - begins, *found, int(parting.sum()), len(given))
