"""Two recordings beside each other: the loop that reads the table of checks, and what is not a plain value."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.models import Precision
from rlexp.config.schema.row_kinds import EXAMPLE
from rlexp.run_files.curve_distance import OWN
from rlexp.verify.checks import (
    CHECKS,
    DUE,
    FLOAT64,
    METER,
    MODEL,
    OF_DTYPE,
    OF_TRAIN,
    RING,
    STOPPED,
    TRAIN,
    Allowed,
    Requirement,
)
from rlexp.verify.norms import common_factor, gradients_apart, in_bfloat16, shares, weights_apart
from rlexp.verify.recording import ANSWER, START, Key, Recording, Scene

FORMULA = "formula: "  # before what the loss's formula itself was given, and has made
SLACK = 10.0  # a parameter's gradient may move by more than its share of the derivatives: its terms cancel


@dataclass(frozen=True)
class Deviation:
    """A difference of two recordings: `got` in the first, `expected` by the second."""

    check: Requirement
    step: int
    quantity: str
    got: str
    expected: str
    note: str = ""
    folder: str = ""  # where the difference itself knows it
    of: tuple[str, str] = ("", "")  # the scene and the quantity


@dataclass
class Gauge:
    """The largest difference of each quantity so far."""

    largest: dict[str, float] = field(default_factory=dict)

    def exceeds(self, quantity: str, difference: float, allowed: float) -> bool:
        """Note a difference and say whether it is more than allowed; NaN always is."""
        if quantity:
            known = difference if math.isfinite(difference) else math.inf
            self.largest[quantity] = max(known, self.largest.get(quantity, 0.0))
        return not difference <= allowed


@dataclass
class TwoRuns:
    """Two recordings of the same steps. With `every`, each has all that the other has; else the second has less."""

    cfg: Config
    got: Recording
    wanted: Recording
    allowed: Allowed = FLOAT64
    every: bool = False
    gauge: Gauge = field(default_factory=Gauge)
    border: float = 2e-11  # by which rounding moves a border between two tokens
    known: dict[int, float] = field(default_factory=dict)  # how far the weights lie apart, by step

    def differences(self) -> Iterator[Deviation]:
        """Yield all differences in order; usually none."""
        meant = {scene.name: scene for scene in self.wanted.scenes}
        for scene in self.got.scenes:
            if scene.name not in meant:
                had = {each.name for each in self.got.scenes}
                missing = next((each for each in self.wanted.scenes if each.name not in had), None)
                if missing is not None:  # another rollout or step was due
                    yield Deviation(DUE, scene.step, missing.name, "is not there", "is there")
                return
            yield from self.of_scene(scene, meant[scene.name])
        got, wanted = (each.stopped or "everything is finite" for each in (self.got, self.wanted))
        if got != wanted:
            yield Deviation(CHECKS[-1], len(self.got.steps()), STOPPED, got, wanted)

    def of_scene(self, scene: Scene, other: Scene) -> Iterator[Deviation]:
        drift, seen = self.drift(scene.step), set[str]()
        names = {*other.values, *other.own, *scene.own, *(scene.values if self.every else ())}
        names |= {name for name in scene.values if name.removeprefix(FORMULA) in other.values}
        for check in CHECKS:
            if check.quantity in SPECIAL:
                yield from SPECIAL[check.quantity](self, check, scene, other, drift)
            elif check.quantity != OF_DTYPE or self.cfg.train.precision is Precision.fp64:
                for quantity in sorted(set(fnmatch.filter(names, check.quantity)) - seen):
                    seen.add(quantity)
                    yield from self.of_quantity(check, quantity, scene, other, drift)

    def of_quantity(
        self, check: Requirement, quantity: str, scene: Scene, other: Scene, drift: float
    ) -> Iterator[Deviation]:
        for owner in (scene.own, other.own):
            for key, pair in owner.get(quantity, {}).items():
                yield from self.compared(check, scene, quantity, key, *pair, 0.0, drift)
        got_of, meant_of = scene.values.get(quantity, {}), other.values.get(quantity)
        if meant_of is None:
            meant_of = other.values.get(quantity.removeprefix(FORMULA), {}) if quantity.startswith(FORMULA) else {}
        size = self.size_of(check, other, meant_of)
        for key in dict.fromkeys((*meant_of, *(got_of if self.every or check.bound is None else ()))):
            yield from self.compared(check, scene, quantity, key, got_of.get(key), meant_of.get(key), size, drift)

    def size_of(self, check: Requirement, other: Scene, values: Mapping[Key, Any]) -> float:
        """The size that differences of a quantity are relative to, at least."""
        if check.quantity == "part of the loss":  # relative to the size of its terms, which may cancel
            return self.wanted.loss.get(other.step, self.got.loss.get(other.step, (0.0, 1.0)))[1]
        if check.sums:
            return 1e-3 * max(
                (abs(float(value)) for value in other.values.get("sum of policy", {}).values()), default=0
            )
        arrays = [np.abs(np.asarray(value, dtype=float)) for value in values.values() if check.largest]
        if self.cfg.loss.draws and check.bound in ("formula", "chain"):  # without advantages only rounding is left
            arrays += [(1.0 if self.every else 1e-3) * each for each in other.values.get("given: weight", {}).values()]
        return max((float(each.max(initial=0.0)) for each in arrays), default=0.0)

    def compared(
        self,
        check: Requirement,
        scene: Scene,
        quantity: str,
        key: Key,
        got: Any,
        wanted: Any,
        size: float,
        drift: float,
    ) -> Iterator[Deviation]:
        if check.bound is None or got is None or wanted is None:
            if not equal(got, wanted):
                deviation = self.difference(check, scene, quantity, key, got, wanted)
                not_given = got is None and quantity.startswith("formula: slope by")  # nothing to differentiate by
                yield replace(deviation, folder=TRAIN) if not_given else deviation
            return
        a, b = np.atleast_1d(np.asarray(got, dtype=float)), np.atleast_1d(np.asarray(wanted, dtype=float))
        if a.shape != b.shape:
            yield self.difference(check, scene, quantity, key, a, b)
        elif len(b):
            least = max(size, 1e-300) if check.largest else np.maximum(max(check.least, size), np.abs(b))
            apart = np.abs(a - b) / least
            apart[np.isnan(a) & quantity.startswith("derivative by")] = 0.0  # an engine has scaled it to 0
            exact = check.bound in ("given", "norm", "border")  # by values of the same recording
            bound = self.border if check.bound == "border" else float(getattr(self.allowed, check.bound))
            if self.every and check.bound in ("formula", "chain", "kept"):  # by log-probabilities of two runs
                bound = self.allowed.logp
            allowed = bound * (1.0 if exact else drift)
            if self.gauge.exceeds(check.gauge, float(apart.max()), allowed):
                wrong = np.flatnonzero(~(apart <= allowed))
                at, note = int(wrong[0]), f"{len(wrong)} of its {len(a)} values differ" * (len(a) > 1)
                yield self.difference(check, scene, quantity, key, a[at], b[at], at if len(a) > 1 else None, note)

    def drift(self, step: int) -> float:
        """Factor by which tolerances grow, because the weights before this step differ by more than is allowed.

        Each earlier step was right, given its gradient. But Adam divides by the size of a gradient even where that size
        is nothing but rounding, and a large learning rate multiplies the result. Such a difference is no defect, and
        values computed with such weights may differ by the same factor: at least 1, at most 10,000.
        """
        return min(1e4, max(1.0, self.apart(step - 1) / self.allowed.weights)) if step > 1 else 1.0

    def apart(self, step: int) -> float:
        """How far the weights after a step lie apart."""
        if step not in self.known:
            self.known[step] = weights_apart(self.got.files, self.wanted.files, step)
        return self.known[step]

    def difference(
        self, check: Requirement, scene: Scene, quantity: str, key: Key, got: Any, wanted: Any, at: int | None = None,
        note: str = "",
    ) -> Deviation:  # fmt: skip
        """Put a difference into words."""
        arrays = isinstance(got, np.ndarray) and isinstance(wanted, np.ndarray)
        if arrays and got.shape == wanted.shape:
            at = int(np.flatnonzero(got != wanted)[0])
            got, wanted = got[at], wanted[at]
        elif arrays:
            got, wanted = (f"{len(each)} of them" for each in (got, wanted))
        what = f"{quantity}{self.named(scene, key, at)}"
        note = note or whole_factor(got, wanted)
        return Deviation(check, scene.step, what, shown(got), shown(wanted), note, of=(scene.name, quantity))

    def named(self, scene: Scene, key: Key, at: int | None) -> str:
        """Say what a value belongs to."""
        token = "" if at is None else f", token {at}"
        if self.cfg.loss.draws and key[1:] == (ANSWER,):
            number = scene.name.removeprefix("rollout ") if scene.name.startswith("rollout ") else ""
            origins = (f" ({sample.origin})" for samples in self.got.rollouts.values() for sample in samples
                       if sample.place == key[0])  # fmt: skip
            return f"{token} of sample {key[0]}{number and f' of rollout {number}'}{next(origins, '')}"
        if key and isinstance(key[0], int):
            example = self.got.examples.get(key[0])
            origin = "" if example is None else f" ({example.origin})"
            return (
                f"{token} of {EXAMPLE[self.cfg.loss.rows]} {key[0]}{origin}{''.join(f', {each}' for each in key[1:])}"
            )
        words = ", ".join(str(part) for part in key if isinstance(part, str) and part not in ("it", "order"))
        return f"{token}{words and f': {words}'}"


def equal(got: Any, wanted: Any) -> bool:
    if isinstance(got, np.ndarray) and isinstance(wanted, np.ndarray):
        return np.array_equal(got, wanted)
    return bool(got == wanted) if not isinstance(got, np.ndarray) and not isinstance(wanted, np.ndarray) else False


def shown(value: Any) -> str:
    if value is None:
        return "is not there"
    return f"{float(value):.12g}" if isinstance(value, float | np.floating) else str(value)


def whole_factor(got: Any, wanted: Any) -> str:
    """Name a factor that is nearly a whole number or its inverse, since it often names the mistake."""
    if not all(isinstance(each, int | float | np.number) for each in (got, wanted)):
        return ""
    if not wanted or not math.isfinite(got) or got / wanted <= 0:
        return ""
    factor = float(got / wanted)
    for number, words in ((factor, "{:.0f} times too large"), (1 / factor, "a {:.0f}th of it")):
        if number > 1.5 and abs(number - round(number)) < 1e-6 * number:
            return words.format(number)
    return ""


# ---- what is not a plain value ----


def at_the_start(pair: TwoRuns, check: Requirement, scene: Scene, _other: Scene, _drift: float) -> Iterator[Deviation]:
    """The weights that training starts from: all bits of them. A run in less than float64 holds those of its masters,
    or of what computes if nothing trains it."""
    if scene.name != START:
        return
    ran, meant = pair.got.files, pair.wanted.files
    names, wanted = ran.names("weights", 0), meant.names("weights", 0)
    for name in sorted(set(names) ^ set(wanted)):
        words = ("is there", "is not there")
        yield Deviation(check, 1, name, words[name not in names], words[name not in wanted])
    trained = meant.names("gradient", 1)
    for name in sorted(set(names) & set(wanted)):
        ours, theirs = ran.read("weights", 0, name), meant.read("weights", 0, name)
        if ours.dtype != theirs.dtype:
            rounded = pair.cfg.train.precision is Precision.bf16 and name not in trained
            theirs = in_bfloat16(theirs) if rounded else theirs.astype(np.float32)
        if ours.shape != theirs.shape:
            yield Deviation(check, 1, f"starting weight {name}", f"shape {ours.shape}", f"shape {theirs.shape}")
        elif not np.array_equal(ours, theirs):
            at = int(np.nanargmax(np.where(np.isfinite(ours), np.abs(ours - theirs), np.inf)))
            values = shown(float(ours.reshape(-1)[at])), shown(float(theirs.reshape(-1)[at]))
            yield Deviation(check, 1, f"starting weight {name}", *values)


def train_batch_loss(
    pair: TwoRuns, check: Requirement, scene: Scene, other: Scene, drift: float
) -> Iterator[Deviation]:
    """The loss of the train batch, from the losses of its examples; allowed is also what the rounding of their sums of
    log-probabilities may move."""
    if not scene.values.get("loss") or not other.values.get("loss"):
        return
    got, wanted = (float(np.mean([*each.values["loss"].values()])) for each in (scene, other))
    sums = other.values["sum of policy"]
    moved = float(
        np.mean([abs(slope * sums[key]) for key, slope in other.values["slope"].items() if key in sums] or [0])
    )
    bound = drift * (pair.allowed.loss + 4e-14 * moved / (abs(wanted) or 1.0))
    if pair.gauge.exceeds(check.gauge, abs(got - wanted) / (abs(wanted) or 1.0), bound):
        yield Deviation(check, scene.step, check.quantity, shown(got), shown(wanted), whole_factor(got, wanted))


def gradient(pair: TwoRuns, check: Requirement, scene: Scene, other: Scene, drift: float) -> Iterator[Deviation]:
    """The gradient of each parameter."""
    ran, meant = pair.got.files, pair.wanted.files
    names, wanted = (files.names("gradient", scene.step) for files in (ran, meant))
    if not scene.name.startswith("step ") or not names or not wanted:
        return
    words = {True: "is trained", False: "is frozen"}
    for name in sorted(set(names) ^ set(wanted)):
        yield Deviation(check, scene.step, name, words[name in names], words[name in wanted], folder=MODEL)
    sizes = gradients_apart(ran, meant, scene.step)
    apart = shares(sizes)
    largest = max(apart, key=lambda share: math.inf if math.isnan(share) else share)
    whole = math.sqrt(sum(size.wanted**2 for size in sizes)) or 1.0
    pair.gauge.exceeds("gradient, whole", math.sqrt(sum(size.apart**2 for size in sizes)) / whole, math.inf)
    bound = max(pair.allowed.gradient * drift, slack(pair, scene, other))
    if pair.gauge.exceeds("gradient of a parameter", largest, bound):
        wrong = [size for size, share in zip(sizes, apart, strict=True) if not share <= bound]
        worst = sizes[apart.index(largest)]
        note = f"{len(wrong)} of {len(sizes)} parameters differ" + common_factor(wrong)
        what = f"{worst.name} (‖difference‖ / ‖gradient‖ = {worst.apart / (worst.wanted or 1.0):.2g}), norm"
        yield Deviation(check, scene.step, what, shown(worst.got), shown(worst.wanted), note)


def slack(pair: TwoRuns, scene: Scene, other: Scene) -> float:
    """How far gradients may differ, relatively, because the loss's derivatives do. Where no score has a signal, they
    are the divergence's alone: while the policy has hardly left the reference, a difference that rounding makes."""
    ours, theirs = (each.values.get("derivative by policy", {}) for each in (scene, other))
    size = sum(float(np.abs(each).sum()) for each in theirs.values())
    if not pair.cfg.loss.draws or not size:
        return 0.0
    moved = sum(float(np.abs(np.nan_to_num(ours[key]) - each).sum()) for key, each in theirs.items()
                if key in ours and len(ours[key]) == len(each))  # fmt: skip
    return SLACK * moved / size


def learning_rate(pair: TwoRuns, check: Requirement, scene: Scene, other: Scene, drift: float) -> Iterator[Deviation]:
    got, wanted = (each.row.get("train/learning_rate") for each in (scene, other))
    if got is not None and wanted is not None:
        yield from pair.compared(check, scene, check.quantity, (), got, wanted, 0.0, drift)


def norm_of_gradient(
    pair: TwoRuns, check: Requirement, scene: Scene, _other: Scene, _drift: float
) -> Iterator[Deviation]:
    """The logged norm, given the run's own gradient."""
    if scene.name.startswith("step ") and (got := scene.row.get("train/grad_norm")) is not None:
        files = pair.got.files
        own = math.sqrt(sum(float((np.asarray(files.read("gradient", scene.step, n), np.float64) ** 2).sum())
                            for n in files.names("gradient", scene.step)))  # fmt: skip
        yield from pair.compared(check, scene, check.quantity, (), got, own, 0.0, 1.0)


def given_gradient(
    pair: TwoRuns, check: Requirement, scene: Scene, _other: Scene, _drift: float
) -> Iterator[Deviation]:
    """The weights after a step given the run's own gradient, which is exact. How far the weights of two runs lie apart
    is only measured: where a gradient is nothing but rounding, Adam's division by its size makes it large."""
    updates = scene.values.get(check.quantity, {})
    of_step, of_weight = pair.allowed.updated
    wrong = {}
    for (name,), update in updates.items():
        bound = of_step * update.step + of_weight * update.weight
        pair.gauge.exceeds(check.quantity, update.apart / (update.weight or 1.0), math.inf)
        if not update.apart <= bound:
            wrong[name] = update.apart / (bound or 1e-300)
    if updates:
        pair.gauge.exceeds("weights after the step", pair.apart(scene.step), math.inf)
    if wrong:
        update = updates[max(wrong, key=lambda each: wrong[each]),]
        what = f"{max(wrong, key=lambda each: wrong[each])}, ‖its step − what it should be‖"
        note = f"{len(wrong)} of {len(updates)} parameters differ"
        yield Deviation(check, scene.step, what, shown(update.apart), f"0, of a step of {update.step:.6g}", note)


def row(pair: TwoRuns, check: Requirement, scene: Scene, other: Scene, drift: float) -> Iterator[Deviation]:
    """The logged values, but for those of the layout itself."""
    allowed, more = pair.allowed.metric
    for name, wanted in other.row.items():
        if pair.every and name.startswith(OWN):
            continue
        folder = TRAIN if any(fnmatch.fnmatchcase(name, each) for each in OF_TRAIN) else METER
        got = scene.row.get(name)
        if got is None:
            yield Deviation(check, scene.step, name, "is not logged", shown(wanted), folder=TRAIN)
        elif pair.gauge.exceeds(name, abs(got - wanted) / (max(abs(got), abs(wanted)) + more), allowed * drift):
            yield Deviation(check, scene.step, name, shown(got), shown(wanted), whole_factor(got, wanted), folder)


def of_the_layout(pair: TwoRuns, check: Requirement, scene: Scene, _other: Scene, _drift: float) -> Iterator[Deviation]:
    """Metrics that describe the layout itself, as far as they can be counted."""
    if not scene.name.startswith("step ") or not scene.row:
        return
    packs, placed, shared = (scene.values.get(name, {}).get(("it",), 0)
                             for name in ("micro-batches", "placed tokens", "shared tokens"))  # fmt: skip
    train, rows = pair.cfg.train, len(scene.values.get("taken", {}))
    passes = packs if train.grad_acc is None else -(-rows * train.grad_acc // train.batch_size)
    for name, wanted in (("micro_batches", packs), ("grad_acc", passes), ("ring_tokens", placed),
                         ("shared_tokens", shared)):  # fmt: skip
        got = scene.row.get(f"train/{name}")
        if got != wanted:
            folder = RING if name.endswith("_tokens") and got is not None else TRAIN
            got_words = "is not logged" if got is None else shown(got)
            yield Deviation(check, scene.step, f"train/{name}", got_words, shown(wanted), folder=folder)


Special = Callable[[TwoRuns, Requirement, Scene, Scene, float], Iterator[Deviation]]
SPECIAL: Mapping[str, Special] = {
    "weights at the start": at_the_start, "loss of the train batch": train_batch_loss, "gradient": gradient,
    "learning rate": learning_rate, "norm of the gradient": norm_of_gradient, STOPPED: lambda *_: iter(()),
    "weights, given the gradient": given_gradient, "row": row, "a metric of the layout": of_the_layout,
}  # fmt: skip
