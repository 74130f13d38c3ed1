"""Compare a run in float32 or bfloat16 with float64, beside the run's noise floor.

Values that follow by arithmetic from the run's earlier values (what the engine is handed, the optimizer's step) are
exact in every precision, and are checked exactly (`OWN`). Log-probabilities, losses and gradients may differ by a
measured multiple of the unit roundoff, or of the noise floor if that is more. See docs/verify.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlexp.config.schema import Config, Device
from rlexp.config.schema.models import Precision
from rlexp.verify.checks import ENGINE as OF_ENGINE
from rlexp.verify.checks import FLOAT64, GRADIENT, LOGPS, ROLLOUT, Requirement
from rlexp.verify.checks import LOSS as OF_LOSS
from rlexp.verify.compare import Deviation, TwoRuns
from rlexp.verify.norms import common_factor, gradients_apart, shares, weights_apart
from rlexp.verify.recording import Array, Key, Recording, Scene, TensorFiles

UNIT = {Precision.fp32: 2.0**-24, Precision.bf16: 2.0**-9}
GIVEN_PARTS = "gradient, given its parts"
OF_PARTS = 1e-5  # on a GPU, where the order of additions varies, four units of roundoff
OF_FLOOR = 8.0  # a run may differ from float64 by this many times its difference to another micro-batch size,
LONG = 1024  # tokens of an answer whose rounding has averaged out: (bound of a token / bound of an answer)²
MOST_FLOOR = 2.0  # but by no more than this many times the rounding bound: a defect may raise the floor too
MODELS = ("policy", "reference", "scored: old", "scored: behaviour", "scored: reference")  # that say log-probabilities
CRITIC = ("values", "scored: values")

# For what is exact; log-probabilities and gradients are bounded by `QUANTITIES` instead.
OWN = replace(
    FLOAT64, logp=math.inf, loss=math.inf, gradient=math.inf, weights=math.inf, norm=1e-5, chain=1e-5, formula=1e-5,
    kept=2.0**-22,
    updated=(1e-3, 2.0**-23),  # the optimizer works in float32 in both
    metric=(math.inf, 0.01),
)  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A kind of difference to float64, and its bound in units of roundoff."""

    name: str
    stage: str
    units: Mapping[Precision, float]
    between: Callable[[OfStep, OfStep], float]


@dataclass(frozen=True)
class Measured:
    """A quantity's difference to float64, and to the same layout with another micro-batch size."""

    quantity: str
    own: float
    floor: float | None
    allowed: float


@dataclass(frozen=True)
class OfStep:
    """The results of one step: what models say of each token (or answer), the loss, the files."""

    number: int
    models: Mapping[str, Mapping[Key, Array]]
    loss: float
    scale: float  # the size of the loss's terms
    files: TensorFiles
    scores: bool = False  # of answers, and not log-probabilities of tokens


def of_steps(cfg: Config, recording: Recording, other: Recording, *, scores: bool) -> list[OfStep]:
    """The steps of a recording. `other` knows the sizes of the losses' terms."""
    made: list[OfStep] = []
    before: dict[str, Any] = {}
    for scene in recording.scenes:
        models: dict[str, Any] = {who: scene.values[who] for who in (*MODELS, *CRITIC) if who in scene.values}
        if scores and "sum of policy" in scene.values:
            models = {"policy": {key: np.array([value]) for key, value in scene.values["sum of policy"].items()}}
        if not scene.name.startswith("step "):
            before = models
            continue
        scale = other.loss.get(scene.step, (0.0, 1.0))[1]
        loss = recording.loss[scene.step][0] if scene.step in recording.loss else loss_of(cfg, scene)
        made.append(OfStep(scene.step, {**before, **models}, loss, scale, recording.files, scores))
        before = {}
    return made


def loss_of(cfg: Config, scene: Scene) -> float:
    """The loss of a recorded step."""
    if cfg.loss.draws:
        return float(scene.values.get("part of the loss", {}).get(("loss",), math.nan))
    return float(np.mean([*scene.values.get("loss", {}).values()] or [math.nan]))


def measure(cfg: Config, run: Recording, floor: Recording, meant: Recording, *, scores: bool
            ) -> tuple[list[Measured], Deviation | None]:  # fmt: skip
    """Return the table of a run, and the first quantity that rounding does not explain.

    At the first step all weights are the same, so only rounding differs. Later two precisions move apart, as far as the
    optimizer takes them: the difference of the weights is shown, and not judged. Of drawn samples the pass alone goes
    on from the run's own weights, so what models say is compared at every step.
    """
    unit, drawn = UNIT[cfg.train.precision], cfg.loss.draws
    ours, others, theirs = (of_steps(cfg, each, meant, scores=scores) for each in (run, floor, meant))
    alike_first = alike(run, floor) if drawn else True
    table: list[Measured] = []
    first: Deviation | None = None
    for quantity in QUANTITIES:
        explained = quantity.units[cfg.train.precision] * unit
        if drawn and math.isinf(explained):
            continue  # each step begins with the same weights
        place = 0 if math.isfinite(explained) else min(len(ours), len(theirs)) - 1
        other = others[place] if alike_first and place < len(others) else None
        distance = None if other is None else quantity.between(other, ours[place])
        allowed = max(explained, min(OF_FLOOR * (distance or 0.0), MOST_FLOOR * explained))
        later = range(1, min(len(ours), len(theirs))) if drawn and quantity.stage == LOGPS else ()
        apart = {at: quantity.between(ours[at], theirs[at]) for at in (place, *later)}
        table.append(Measured(quantity.name, max(apart.values()), distance, allowed))
        wrong = next((at for at, each in apart.items() if not each <= allowed), None)
        if first is None and wrong is not None:
            first = _named(replace(table[-1], own=apart[wrong]), quantity, ours[wrong], theirs[wrong])
    return table, first


def alike(one: Recording, other: Recording) -> bool:
    """Whether two runs have drawn the same samples first, with the same scores: rounding may make them draw others."""
    pairs = zip(one.rollouts.get(0, []), other.rollouts.get(0, []), strict=False)
    return all(np.array_equal(a.answer, b.answer) and a.score == b.score for a, b in pairs)


def of_drawn(pair: TwoRuns) -> list[Measured]:
    """What is checked at every step of samples that the policy drew, given the run's earlier values."""
    given, slopes = "what the loss is given", "derivatives of the loss, given the tokens"
    rows = ((given, given, pair.allowed.kept), (slopes, "derivatives, given the tokens", pair.allowed.formula))
    largest = pair.gauge.largest if pair.cfg.loss.draws else {}
    return [Measured(words, largest[name], None, allowed) for name, words, allowed in rows if name in largest]


def given_parts(cfg: Config, run: Recording, parts: TensorFiles, steps: int) -> tuple[Measured, Deviation | None]:
    """Compare the engine's gradients with the sum of autograd's for each micro-batch and rank, with the run's weights.

    The rounding of the parts is in both. What remains is the sum, which every engine takes in float32."""
    exact = cfg.train.precision is Precision.fp64
    rounding = 4 * UNIT[cfg.train.precision] if cfg.launch.device is Device.cuda and not exact else 0.0
    allowed = 1e-9 if exact else max(OF_PARTS, rounding)
    largest = 0.0
    for step in range(1, steps + 1):
        sizes = gradients_apart(run.files, parts, step)
        if not sizes:
            break
        apart = shares(sizes)
        most = max(apart, key=lambda share: math.inf if math.isnan(share) else share)
        largest = max(largest, most)
        if not most <= allowed:
            worst = sizes[apart.index(most)]
            what = f"{worst.name} (‖difference‖ / ‖gradient‖ = {most:.2g}), given the parts of the ranks, norm"
            note = common_factor(sizes).lstrip("; ")
            check = Requirement(GIVEN_PARTS, GRADIENT, OF_ENGINE)
            deviation = Deviation(check, step, what, f"{worst.got:.9g}", f"{worst.wanted:.9g}", note)
            return Measured(GIVEN_PARTS, most, None, allowed), deviation
    return Measured(GIVEN_PARTS, largest, None, allowed), None


def _named(held: Measured, quantity: Quantity, got: OfStep, meant: OfStep) -> Deviation:
    """The difference, with the model whose log-probabilities differ, or the parameter whose gradient differs most."""
    check, name = Requirement(quantity.name, quantity.stage, OF_ENGINE), quantity.name
    note = "" if held.floor is None else f"noise floor {held.floor:.2g}"
    for who in (*MODELS[1:], *CRITIC) if quantity.stage == LOGPS else ():
        if who in meant.models and who in got.models:
            without = replace(got, models={**got.models, who: meant.models[who]})
            if quantity.between(without, meant) <= held.allowed:
                folder = ROLLOUT if who.startswith("scored: ") else OF_ENGINE
                check, name = replace(check, folder=folder), f"{name}, of {who.removeprefix('scored: ')}"
                break
    if quantity.stage == GRADIENT:
        sizes = gradients_apart(got.files, meant.files, meant.number)
        worst = max(sizes, key=lambda size: size.apart / (size.wanted or 1.0))
        note = f"{note}; worst: {worst.name}, norm {worst.got:.6g} against {worst.wanted:.6g}{common_factor(sizes)}"
    return Deviation(check, meant.number, name, f"{held.own:.2g} from float64", f"{held.allowed:.2g} at most",
                      note.lstrip("; "))  # fmt: skip


def _of_tokens(a: OfStep, b: OfStep, whose: tuple[str, ...]) -> float:
    return max(
        (float((np.abs(a.models[who][key] - theirs) / np.maximum(1.0, np.abs(theirs))).max(initial=0.0))
         if key in a.models[who] and len(a.models[who][key]) == len(theirs) else math.inf
         for who in whose if who in b.models and who in a.models for key, theirs in b.models[who].items()), default=0.0,
    )  # fmt: skip


def of_tokens(a: OfStep, b: OfStep) -> float:
    """The largest difference of a token's log-probability, relative to max(1, |log-probability|)."""
    return _of_tokens(a, b, MODELS)


def of_values(a: OfStep, b: OfStep) -> float:
    """The same of a critic's values; 0 without one."""
    return _of_tokens(a, b, CRITIC)


def of_pairs(a: OfStep, b: OfStep) -> float:
    """The largest relative difference of an answer's sum. Of a short answer it counts less: the fewer its tokens are,
    the less their rounding averages out, until it is that of a single token."""

    def apart(got: Array, wanted: Array) -> float:
        short = 1.0 if b.scores else max(1.0, math.sqrt(LONG / max(1, len(wanted))))
        return abs(float(got.sum() - wanted.sum())) / max(1.0, abs(float(wanted.sum()))) / short

    return max((apart(a.models[who][key], theirs) if key in a.models[who] else math.inf
                for who in MODELS if who in b.models and who in a.models
                for key, theirs in b.models[who].items()), default=0.0)  # fmt: skip


def of_loss(a: OfStep, b: OfStep) -> float:
    return abs(a.loss - b.loss) / (b.scale or 1.0)


def of_gradient(a: OfStep, b: OfStep) -> float:
    """‖a − b‖ / ‖b‖ over all parameters together."""
    sizes = gradients_apart(a.files, b.files, b.number)
    return math.sqrt(sum(s.apart**2 for s in sizes)) / (math.sqrt(sum(s.wanted**2 for s in sizes)) or 1.0)


def of_parameter(a: OfStep, b: OfStep) -> float:
    """The largest ‖a − b‖ / ‖b‖ of a parameter; see `shares`."""
    return max(shares(gradients_apart(a.files, b.files, b.number)), default=0.0)


def _units(fp32: float, bf16: float) -> dict[Precision, float]:
    return {Precision.fp32: fp32, Precision.bf16: bf16}


# Bounds in units of roundoff: the largest measured over layouts and models, with a margin (docs/measured/verify.md).
QUANTITIES = (
    Quantity("log-probability of a token", LOGPS, _units(1024, 512), of_tokens),
    Quantity("log-probabilities per example", LOGPS, _units(32, 16), of_pairs),
    Quantity("value of a token", LOGPS, _units(64, 64), of_values),
    Quantity("loss", OF_LOSS, _units(256, 32), of_loss),
    Quantity("gradient", GRADIENT, _units(512, 128), of_gradient),
    Quantity("gradient of a parameter", GRADIENT, _units(1024, 256), of_parameter),
    Quantity("weights after the step", "optimizer", _units(math.inf, math.inf),
             lambda a, b: weights_apart(a.files, b.files, b.number)),
)  # fmt: skip


def rounding_of_token(precision: Precision) -> float:
    """How far the log-probability of a token may lie from float64's, relative to max(1, |it|)."""
    return FLOAT64.logp if precision is Precision.fp64 else QUANTITIES[0].units[precision] * UNIT[precision]


def beside_float64(cfg: Config, run: Recording, meant: Recording) -> TwoRuns:
    """A run beside float64. Of rows, the derivative by a token is float64's own: the gradient's bound holds it."""
    allowed = OWN if cfg.loss.draws else replace(OWN, chain=math.inf)
    border = math.expm1(2 * rounding_of_token(cfg.train.precision))  # by which rounding moves that of two tokens
    return TwoRuns(cfg, run, meant, allowed, border=border)
