"""Compare a run in float32 or bfloat16 with the float64 reference, beside the run's noise floor.

Values that follow by arithmetic from the run's earlier values (losses, sums, metrics, the optimizer's step) are exact
in every precision, and are checked exactly. Log-probabilities and gradients may differ by a measured multiple of the
unit roundoff, or of the noise floor if that is more. See docs/verify.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlexp.config.schema import Device
from rlexp.config.schema.models import Precision
from rlexp.verify.compared import Comparison
from rlexp.verify.compared_samples import CRITIC, HELD_OUT
from rlexp.verify.findings import FLOAT64, GRADIENT, LOGPS, LOSS, OPTIMIZER, Allowed, Clue, Finding
from rlexp.verify.norms import Size, common_factor, relative, shares, size_of
from rlexp.verify.records import Array, Key, TensorFiles

UNIT = {Precision.fp32: 2.0**-24, Precision.bf16: 2.0**-9}
GIVEN_PARTS = "gradient, given its parts"
OF_PARTS = 1e-5  # on a GPU, where the order of additions varies, four units of roundoff
OF_FLOOR = 8.0  # a run may differ from float64 by this many times its difference to another micro-batch size,
LONG = 1024  # tokens of an answer whose rounding has averaged out: (bound of a token / bound of an answer)²
MOST_FLOOR = 2.0  # but by no more than this many times the rounding bound: a defect may raise the floor too

REFERENCE = "reference model"
OF_SAMPLES = (("policy as it generated", Clue.BEHAVIOUR), ("policy as it was scored", Clue.SCORED),
              ("critic as it was scored", Clue.SCORED), (HELD_OUT, Clue.BEHAVIOUR))  # fmt: skip

# For the stages; log-probabilities and gradients are bounded by `QUANTITIES` instead.
OWN = {
    precision: Allowed(
        logp=math.inf,
        loss=math.inf,
        loss_of_sums=0.0,
        gradient=math.inf,
        weights=math.inf,
        given=1e-12,
        norm=1e-5,
        updated=(1e-3, 2.0**-23),  # the optimizer works in float32 in both
        metric=(math.inf, 0.01),
        loss_of_samples=math.inf,
        formula=1e-5,  # it works in float32 in both
        kept=2.0**-22,
    )
    for precision in UNIT
}


@dataclass(frozen=True)
class Quantity:
    """A kind of difference to the float64 reference, and its bound in units of roundoff."""

    name: str
    stage: str
    clue: Clue
    units: Mapping[Precision, float]
    between: Callable[[Values, Values], float]


@dataclass(frozen=True)
class Measured:
    """A quantity's difference to the float64 reference, and to the same layout with another micro-batch size."""

    quantity: str
    own: float
    floor: float | None
    allowed: float


@dataclass(frozen=True)
class Values:
    """The results of one step, of a run or of the reference."""

    number: int
    said: Mapping[str, Mapping[Key, Array]]  # log-probabilities of each token, by the model that says them
    loss: float
    scale: float  # the size of the loss's terms
    files: TensorFiles
    scores: bool = False  # said are scores of answers, and not log-probabilities of tokens


def measure(run: Comparison, other: Comparison) -> tuple[list[Measured], Finding | None]:
    """Return the table of a run, and the first quantity that rounding does not explain.

    At the first step all weights are the same, so only rounding differs. Later two precisions move apart, as far as the
    optimizer takes them: the difference of the weights is shown, and not judged. Of drawn samples the reference goes on
    from the run's own weights, so what models say is compared at every step.
    """
    unit, drawn = UNIT[run.cfg.train.precision], run.cfg.loss.draws
    table: list[Measured] = []
    first: Finding | None = None
    begin, end = (_values(run, other, place) for place in (0, -1))
    later = [_values(run, None, place) for place in range(1, len(list(run.steps())) if drawn else 1)]
    for quantity in QUANTITIES:
        explained = quantity.units[run.cfg.train.precision] * unit
        if drawn and math.isinf(explained):
            continue  # each step begins with the same weights
        ours, others, meant = begin if math.isfinite(explained) else end
        floor = None if others is None else quantity.between(others, ours)
        allowed = max(explained, min(OF_FLOOR * (floor or 0.0), MOST_FLOOR * explained))
        pairs = [(ours, meant), *((mine, theirs) for mine, _, theirs in (later if quantity.stage == LOGPS else ()))]
        apart = [quantity.between(*pair) for pair in pairs]
        table.append(Measured(quantity.name, max(apart), floor, allowed))
        wrong = next((place for place, each in enumerate(apart) if not each <= allowed), None)
        if first is None and wrong is not None:
            first = _named(replace(table[-1], own=apart[wrong]), quantity, *pairs[wrong])
    return table, first


def of_drawn(run: Comparison) -> list[Measured]:
    """What is checked at every step of samples that the policy drew, given the run's earlier values."""
    given, slopes = "what the loss is given", "derivatives of the loss, given the tokens"
    rows = ((given, given, run.allowed.kept), (slopes, "derivatives, given the tokens", run.allowed.formula))
    largest = run.gauge.largest
    return [Measured(words, largest[name], None, allowed) for name, words, allowed in rows if name in largest]


def given_parts(run: Comparison, parts: TensorFiles) -> tuple[Measured, Finding | None]:
    """Compare the engine's gradients with the sum of autograd's for each micro-batch and rank, with the run's weights.

    The rounding of the parts is in both. What remains is the sum, which every engine takes in float32."""
    on_gpu = run.cfg.launch.device is Device.cuda
    allowed = max(OF_PARTS, 4 * UNIT[run.cfg.train.precision]) if on_gpu else OF_PARTS
    largest = 0.0
    for step in (step.number for step in run.expected.steps):
        sizes = [
            size_of(run.ran.read("gradient", step, name), parts.read("gradient", step, name), name)
            for name in parts.names("gradient", step)
        ]
        apart = shares(sizes)
        most = max(apart, key=lambda share: math.inf if math.isnan(share) else share)
        largest = max(largest, most)
        if not most <= allowed:
            worst = sizes[apart.index(most)]
            what = f"{worst.name} (‖difference‖ / ‖gradient‖ = {most:.2g}), given the parts of the ranks, norm"
            got, wanted = f"{worst.got:.9g}", f"{worst.wanted:.9g}"
            note = common_factor(sizes).lstrip("; ")
            finding = Finding(step, GRADIENT, Clue.PARTS, what, got, wanted, note)
            return Measured(GIVEN_PARTS, most, None, allowed), finding
    return Measured(GIVEN_PARTS, largest, None, allowed), None


def _named(held: Measured, quantity: Quantity, got: Values, meant: Values) -> Finding:
    """The finding, with the model whose log-probabilities differ, or the parameter whose gradient differs most."""
    finding = Finding(
        meant.number,
        quantity.stage,
        quantity.clue,
        quantity.name,
        f"{held.own:.2g} from float64",
        f"{held.allowed:.2g} at most",
        "" if held.floor is None else f"noise floor {held.floor:.2g}",
    )
    for name, clue in ((REFERENCE, Clue.REFERENCE), *OF_SAMPLES):
        if finding.stage == LOGPS and name in meant.said:
            without = replace(got, said={**got.said, name: meant.said[name]})
            if quantity.between(without, meant) <= held.allowed:
                return replace(finding, clue=clue, quantity=f"{finding.quantity}, of the {name}")
    if finding.stage != GRADIENT:
        return finding
    sizes = list(_sizes(got, meant))
    worst = max(sizes, key=lambda size: size.apart / (size.wanted or 1.0))
    note = f"{finding.note}; worst: {worst.name}, norm {worst.got:.6g} against {worst.wanted:.6g}"
    return replace(finding, note=note + common_factor(sizes))


def _values(run: Comparison, other: Comparison | None, place: int) -> tuple[Values, Values | None, Values]:
    """A step of the run, of the run with another micro-batch size, and of the reference."""
    ours, others = (None if each is None else list(each.steps())[place] for each in (run, other))
    assert ours is not None
    said, meant = ours.said()
    scores = run.asks.scores
    there = Values(ours.number, said, ours.mean_loss(), ours.scale, run.ran, scores)
    expected = Values(ours.number, meant, ours.expected.loss, ours.scale, run.meant, scores)
    if other is None or others is None or not others.alike(ours):
        return there, None, expected
    return there, Values(ours.number, others.said()[0], others.mean_loss(), ours.scale, other.ran, scores), expected


def _sizes(a: Values, b: Values) -> Iterator[Size]:
    for name in b.files.names("gradient", b.number):
        yield size_of(a.files.read("gradient", a.number, name), b.files.read("gradient", b.number, name), name)


def of_tokens(a: Values, b: Values) -> float:
    """The largest difference of a token's log-probability, relative to max(1, |log-probability|)."""
    return _of_tokens(a, b, critic=False)


def of_values(a: Values, b: Values) -> float:
    """The same of a critic's values; 0 without one."""
    return _of_tokens(a, b, critic=True)


def _of_tokens(a: Values, b: Values, *, critic: bool) -> float:
    whose = [who for who in b.said if who in a.said and who.startswith(CRITIC) is critic]
    return max(
        (float((np.abs(a.said[who][key] - theirs) / np.maximum(1.0, np.abs(theirs))).max())
         for who in whose for key, theirs in b.said[who].items()), default=0.0,
    )  # fmt: skip


def of_pairs(a: Values, b: Values) -> float:
    """The largest relative difference of an answer's sum. Of a short answer it counts less: the fewer its tokens are,
    the less their rounding averages out, until it is that of a single token."""

    def apart(got: Array, wanted: Array) -> float:
        short = 1.0 if b.scores else max(1.0, math.sqrt(LONG / len(wanted)))
        return abs(float(got.sum() - wanted.sum())) / max(1.0, abs(float(wanted.sum()))) / short

    whose = [who for who in b.said if who in a.said and not who.startswith(CRITIC)]
    return max(apart(a.said[who][key], theirs) for who in whose for key, theirs in b.said[who].items())


def of_loss(a: Values, b: Values) -> float:
    return abs(a.loss - b.loss) / (b.scale or 1.0)


def of_gradient(a: Values, b: Values) -> float:
    """‖a − b‖ / ‖b‖ over all parameters together."""
    sizes = list(_sizes(a, b))
    return math.sqrt(sum(s.apart**2 for s in sizes)) / (math.sqrt(sum(s.wanted**2 for s in sizes)) or 1.0)


def of_parameter(a: Values, b: Values) -> float:
    """The largest ‖a − b‖ / ‖b‖ of a parameter; see `shares`."""
    return max(shares(list(_sizes(a, b))))


def of_weights(a: Values, b: Values) -> float:
    """The largest difference relative to the largest weight of the parameter."""
    pairs = (
        (each.files.read("weights", each.number, name) for each in (a, b))
        for name in b.files.names("weights", b.number)
    )
    return max(relative(*pair) for pair in pairs)


def _units(fp32: float, bf16: float) -> dict[Precision, float]:
    return {Precision.fp32: fp32, Precision.bf16: bf16}


# Bounds in units of roundoff: the largest measured over layouts and models, with a margin (docs/measured/verify.md).
QUANTITIES = (
    Quantity("log-probability of a token", LOGPS, Clue.POLICY, _units(1024, 512), of_tokens),
    Quantity("log-probabilities per example", LOGPS, Clue.POLICY, _units(32, 16), of_pairs),
    Quantity("value of a token", LOGPS, Clue.OF_TOKENS, _units(64, 64), of_values),
    Quantity("loss", LOSS, Clue.POLICY, _units(256, 32), of_loss),
    Quantity("gradient", GRADIENT, Clue.GRADIENT, _units(512, 128), of_gradient),
    Quantity("gradient of a parameter", GRADIENT, Clue.GRADIENT, _units(1024, 256), of_parameter),
    Quantity("weights after the step", OPTIMIZER, Clue.WEIGHTS, _units(math.inf, math.inf), of_weights),
)


def rounding_of_token(precision: Precision) -> float:
    """How far the log-probability of a token may lie from the float64 reference's, relative to max(1, |it|)."""
    return FLOAT64.logp if precision is Precision.fp64 else QUANTITIES[0].units[precision] * UNIT[precision]
