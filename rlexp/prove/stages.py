"""Where do a recorded run and the reference first differ? Stage by stage, in the order of the way of the data.

data → log-probabilities → loss → gradient → optimizer → metrics, and so each step. A stage is looked at twice where
that can be: against the reference, and *given* what the run itself had before it (its own log-probabilities for its
loss, its own gradient for its weights), which is exact in every precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from rlexp.compare.difference import OWN
from rlexp.config.schema import Config, DPOConfig, Precision
from rlexp.prove import textbook
from rlexp.prove.records import (
    SIDES,
    Array,
    Expected,
    Key,
    Micro,
    StepExpected,
    StepSeen,
    TensorFiles,
    TokenPair,
    Trace,
    Update,
    joined,
)

DATA, LOGPS, LOSS = "data", "log-probabilities", "loss"
GRADIENT, OPTIMIZER, METRICS = "gradient", "optimizer", "metrics"
STAGES = (DATA, LOGPS, LOSS, GRADIENT, OPTIMIZER, METRICS)


class Clue(Enum):
    """What was compared when a difference was found; `diagnose.py` makes a room of it."""

    PAIRS = "the data set"
    SAMPLES = "the sampler's batch"
    EXECUTED = "the samples that the step took"
    TOKENS = "a pair's tokens"
    PACK = "the pack"
    SHARD = "the shards"
    START = "the weights at the start"
    DTYPE = "the precision of what computes"
    STALE = "the weights that compute"
    POLICY = "the policy's log-probabilities"
    REFERENCE = "the reference model's log-probabilities"
    SUMS = "sums of log-probabilities"
    LOSSES = "losses, given the sums"
    SLOPES = "the losses' derivatives, given the sums"
    HANDED = "what the engine was handed"
    TRAINED = "which parameters are trained"
    GRADIENT = "the gradient"
    PARTS = "the gradient, given its parts"
    RANKS = "the ranks among themselves"
    RATE = "the learning rate"
    NORM = "the gradient's norm"
    WEIGHTS = "the weights after the step"
    VALUES = "values per pair, given the sums"
    LOGITS = "mean logits"
    REDUCED = "a metric, given its parts"
    POSITION = "a metric that follows from the step"
    ABSENT = "a metric that is missing"


@dataclass(frozen=True)
class Finding:
    """The first difference. `got` is the run's value, `expected` the reference's."""

    step: int
    stage: str
    clue: Clue
    quantity: str
    got: str
    expected: str
    note: str = ""


@dataclass(frozen=True)
class Allowed:
    """What rounding may do, by quantity. Where the numbers come from: docs/verify.md."""

    logp: float  # of a token, relative to max(1, |logp|)
    loss: float  # relative to the loss,
    loss_of_sums: float  # and, on top, to β times the log-probabilities that its margin is the difference of
    gradient: float  # ‖a − b‖ / ‖a‖ of a parameter; see `shares`
    weights: float  # largest difference relative to the largest weight of the parameter
    given: float  # whatever follows by float64 arithmetic from what the run had before
    norm: float  # the gradient's norm, given the gradient
    updated: tuple[float, float]  # the weights, given the gradient: relative to the step, and to the weights
    metric: tuple[float, float]  # relative and absolute


FLOAT64 = Allowed(1e-11, 1e-12, 1e-14, 1e-11, 1e-12, 1e-12, 1e-12, (1e-9, 1e-15), (1e-9, 1e-11))


@dataclass
class Gauge:
    """The largest differences seen, by quantity, as they are held against what is allowed."""

    largest: dict[str, float] = field(default_factory=dict)

    def exceeds(self, quantity: str, difference: float, allowed: float) -> bool:
        """Also where the difference is not a number."""
        known = difference if math.isfinite(difference) else math.inf
        self.largest[quantity] = max(known, self.largest.get(quantity, 0.0))
        return not difference <= allowed


@dataclass
class Comparison:
    """A recorded run held to the reference."""

    cfg: Config
    traces: Sequence[Trace]  # of all ranks
    expected: Expected
    ran: TensorFiles
    meant: TensorFiles
    given_weights: Sequence[Mapping[str, Update]]  # see `reference.given_steps`
    allowed: Allowed
    gauge: Gauge = field(default_factory=Gauge)

    @property
    def loss(self) -> DPOConfig:
        assert isinstance(self.cfg.loss, DPOConfig)
        return self.cfg.loss

    def heads(self) -> list[Trace]:
        """The first rank of each replica."""
        return [trace for trace in self.traces if trace.ring_rank == 0]

    def ring(self, head: Trace) -> list[Trace]:
        return [trace for trace in self.traces if trace.replica == head.replica]

    def differences(self) -> Iterator[Finding]:
        """In the order of the way; usually none, and the first is what counts."""
        yield from self._start()
        for step in self.steps():
            yield from step.differences()
        if (stopped := self.traces[0].stopped) is not None:
            last = len(self.traces[0].steps)
            yield Finding(last, METRICS, Clue.POSITION, "the run refuses to step", stopped, "everything is finite")

    def steps(self) -> Iterator[StepCompared]:
        taken = len(self.traces[0].steps)  # fewer where one was refused
        for place, expected in enumerate(self.expected.steps[:taken]):
            yield StepCompared(self, expected, place, [trace.steps[place] for trace in self.traces])

    def _start(self) -> Iterator[Finding]:
        head = self.traces[0]
        if head.pairs != self.expected.pairs:
            yield Finding(1, DATA, Clue.PAIRS, "pairs in the data set", str(head.pairs), str(self.expected.pairs))
        if head.total_steps != self.expected.total_steps:
            got, wanted = str(head.total_steps), str(self.expected.total_steps)
            yield Finding(1, DATA, Clue.SAMPLES, "optimizer steps of the whole run", got, wanted)
        if self.cfg.train.precision is Precision.fp64 and head.dtypes != ("torch.float64",):
            yield Finding(1, LOGPS, Clue.DTYPE, "precision of the parameters", ", ".join(head.dtypes), "torch.float64")
        names, meant = self.ran.names("weights", 0), self.meant.names("weights", 0)
        for name in sorted(set(names) ^ set(meant)):
            there = ("is there", "is not there")
            yield Finding(1, LOGPS, Clue.START, name, there[name not in names], there[name not in meant])
        for name in names:
            ours, theirs = self.ran.read("weights", 0, name), self.meant.read("weights", 0, name)
            if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
                yield Finding(1, LOGPS, Clue.START, f"starting weight {name}", *_worst(ours, theirs))


@dataclass
class StepCompared:
    whole: Comparison
    expected: StepExpected
    place: int
    steps: Sequence[StepSeen]  # of all ranks

    def differences(self) -> Iterator[Finding]:
        for stage in (self.data, self.logps, self.losses, self.gradient, self.optimizer, self.metrics):
            yield from stage()

    @property
    def number(self) -> int:
        return self.expected.number

    @cached_property
    def drift(self) -> float:
        """How much more than the standing tolerance the weights are apart that the step begins with, and 1 at least.

        Each step that led to them has been found right, given its gradient; but Adam divides by the size of a gradient
        also where that is nothing but rounding, and a large rate multiplies what comes of it. So this is no defect,
        and what is computed with such weights may be apart by as much more. A defect never hides behind 10,000 times.
        """
        ran, meant, before = self.whole.ran, self.whole.meant, self.number - 1
        apart = max(relative(ran.read("weights", before, n), meant.read("weights", before, n))
                    for n in meant.names("weights", before))  # fmt: skip
        return min(1e4, max(1.0, apart / self.whole.allowed.weights))

    def micros(self) -> Iterator[tuple[Trace, int, Micro]]:
        """The micro-batches of each replica, as its first rank saw them."""
        for head in self.whole.heads():
            for place, micro in enumerate(head.steps[self.place].micros):
                yield head, place, micro

    def found(self, stage: str, clue: Clue, quantity: str, got: Any, expected: Any, note: str = "") -> Finding:
        return Finding(self.number, stage, clue, quantity, _shown(got), _shown(expected), note)

    # ---- data ----

    def data(self) -> Iterator[Finding]:
        yield from self._samples()
        for trace in self.whole.traces:
            for micro in trace.steps[self.place].micros:
                for sample in micro.samples:
                    yield from self._tokens(trace.tokens[sample], self.whole.expected.tokens.get(sample), sample)
        for head, place, micro in self.micros():
            pairs = [self.whole.expected.tokens[sample] for sample in micro.samples]
            where = f"micro-batch {place + 1} of replica {head.replica}"
            yield from self._pack(micro, pairs, where)
            yield from self._shards(head, place, micro, where)

    def _samples(self) -> Iterator[Finding]:
        heads = self.whole.heads()
        taken = [sample for head in heads for micro in head.steps[self.place].micros for sample in micro.samples]
        planned = [sample for head in heads for micro in head.steps[self.place].planned for sample in micro]
        wanted = list(self.expected.samples)
        clue = Clue.EXECUTED if planned == wanted else Clue.SAMPLES
        if taken != wanted:
            place = next((i for i, (a, b) in enumerate(zip(taken, wanted, strict=False)) if a != b), None)
            if place is None:
                yield self.found(DATA, clue, "number of samples", len(taken), len(wanted))
            else:
                yield self.found(DATA, clue, f"sample {place + 1}", f"pair {taken[place]}", f"pair {wanted[place]}")
        for head in heads:
            first = [micro.samples for micro in head.steps[self.place].micros]
            for trace in self.whole.ring(head)[1:]:
                theirs = [micro.samples for micro in trace.steps[self.place].micros]
                if theirs != first:
                    where = f"samples of rank {trace.rank}, in the ring of rank {head.rank}"
                    yield self.found(DATA, clue, where, theirs, first)

    def _tokens(self, got: TokenPair, wanted: TokenPair | None, sample: int) -> Iterator[Finding]:
        if wanted is None:
            return
        for part in ("prompt", *SIDES):
            ours, theirs = getattr(got, part), getattr(wanted, part)
            if len(ours) != len(theirs):
                what = f"length of pair {sample} ({wanted.origin}), {part}"
                yield self.found(DATA, Clue.TOKENS, what, len(ours), len(theirs))
            elif not np.array_equal(ours, theirs):
                place = int(np.flatnonzero(ours != theirs)[0])
                what = f"token {place} of pair {sample} ({wanted.origin}), {part}"
                yield self.found(DATA, Clue.TOKENS, what, int(ours[place]), int(theirs[place]))

    def _pack(self, micro: Micro, pairs: Sequence[TokenPair], where: str) -> Iterator[Finding]:
        pack = micro.pack
        assert pack is not None
        sequences = [(len(pair.prompt), pair.sequence(side)) for pair in pairs for side in SIDES]
        if pairs and len(pack.segments) != len(sequences):
            yield self.found(DATA, Clue.PACK, f"sequences in {where}", len(pack.segments), len(sequences))
            return
        end = 0
        owned = np.zeros(len(pack.tokens_T), dtype=bool)
        for number, (prompt, tokens) in enumerate(sequences):
            start, length, padded = pack.segments[number]
            what = f"of sequence {number} in {where}"
            if (start, length) != (end, len(tokens)) or padded < length or end + padded > len(pack.tokens_T):
                said = f"{length} tokens at {start}, padded to {padded}"
                yield self.found(DATA, Clue.PACK, f"segment {what}", said, f"{len(tokens)} tokens at {end}")
                return
            end += padded
            place = slice(start, start + length)
            trained = slice(start + prompt - 1, start + length - 1)
            owner = np.full(length, -1)
            owner[prompt - 1 : length - 1] = number
            owned[trained] = True
            for name, got, wanted in (
                ("token", pack.tokens_T[place], tokens),
                ("position", pack.positions_T[place], np.arange(length)),
                ("trained-on mark", pack.sequence_T[place], owner),
                ("target", pack.targets_T[trained], tokens[prompt:]),
            ):
                wrong = np.flatnonzero(got != wanted)
                if len(wrong):
                    at = int(wrong[0]) + (prompt - 1 if name == "target" else 0)
                    yield self.found(DATA, Clue.PACK, f"{name} at place {at} {what}", got[wrong[0]], wanted[wrong[0]])
        stray = np.flatnonzero((pack.sequence_T >= 0) & ~owned)
        if len(stray):
            yield self.found(DATA, Clue.PACK, f"trained-on mark at {stray[0]} of {where}", "trained on", "padding")

    def _shards(self, head: Trace, place: int, micro: Micro, where: str) -> Iterator[Finding]:
        """Together the ring holds each token of the pack once, with its own target and position."""
        pack = micro.pack
        assert pack is not None
        ring = [trace.steps[self.place].micros[place] for trace in self.whole.ring(head)]
        held = np.concatenate([_rows(m.tokens_t, m.targets_t, m.positions_t, m.sequence_t) for m in ring])
        meant = _rows(pack.tokens_T, pack.targets_T, pack.positions_T, pack.sequence_T)
        real = sum(length for _, length, _ in pack.segments)
        if len(held) != len(meant):
            yield self.found(DATA, Clue.SHARD, f"tokens that the ring holds of {where}", len(held), len(meant))
        elif not np.array_equal(held := held[np.lexsort(held.T)], meant := meant[np.lexsort(meant.T)]):
            wrong = int(np.flatnonzero((held != meant).any(1))[0])
            got, wanted = (
                "token {}, target {}, position {}, of sequence {}".format(*rows[wrong]) for rows in (held, meant)
            )
            yield self.found(DATA, Clue.SHARD, f"a token that the ring holds of {where}", got, wanted)
        elif (found := sum(m.real_tokens for m in ring)) != real:
            yield self.found(DATA, Clue.SHARD, f"real tokens that the ring counts of {where}", found, real)

    # ---- log-probabilities ----

    def logps(self) -> Iterator[Finding]:
        for name in dict.fromkeys(name for step in self.steps for name in step.stale):
            yield self.found(LOGPS, Clue.STALE, f"{name} as it computes", "another value", "what was stepped")
        for clue, what, meant in (
            (Clue.POLICY, "policy", self.expected.policy),
            (Clue.REFERENCE, "reference", self.expected.reference),
        ):
            for key, got in self.by_sequence(f"{what}_t").items():
                yield from self._sequence(clue, what, key, got, meant[key])
        yield from self._sums()

    def by_sequence(self, values: str) -> dict[Key, Array]:
        """Put together from the ring: what each token of an answer got. Twice on the same place is not a number."""
        found: dict[Key, Array] = {}
        for head, place, micro in self.micros():
            parts = {
                (sample, side): np.full(len(self.whole.expected.tokens[sample].answer(side)), np.nan)
                for sample in micro.samples
                for side in SIDES
            }
            for trace in self.whole.ring(head):
                mine = trace.steps[self.place].micros[place]
                got, owner, position = getattr(mine, values), mine.sequence_t, mine.positions_t
                if got is None or position is None:
                    continue
                for number, (sample, side) in enumerate(parts):
                    at = np.flatnonzero(owner == number)
                    first = len(self.whole.expected.tokens[sample].prompt) - 1
                    parts[sample, side][position[at] - first] = got[at]
            found |= parts
        return found

    def _sequence(self, clue: Clue, who: str, key: Key, got: Array, wanted: Array) -> Iterator[Finding]:
        apart = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
        sums = abs(got.sum() - wanted.sum()) / max(1.0, abs(wanted.sum()))
        gauge, allowed = self.whole.gauge, self.whole.allowed.logp * self.drift
        gauge.exceeds("sum of a sequence's log-probabilities", float(sums), allowed)
        if gauge.exceeds("log-probability of a token", float(apart.max()), allowed):
            at = int(np.flatnonzero(~(apart <= allowed))[0])
            sample, side = key
            what = f"{who}, token {at} of pair {sample}, {side}"
            note = f"{int((~(apart <= allowed)).sum())} of its {len(apart)} tokens differ"
            yield self.found(LOGPS, clue, what, got[at], wanted[at], note)

    def _sums(self) -> Iterator[Finding]:
        """What the loss was given, given the tokens: on every rank of the ring."""
        for who in ("policy", "reference"):
            tokens = self.by_sequence(f"{who}_t")
            for trace in self.whole.traces:
                for micro in trace.steps[self.place].micros:
                    for side in SIDES:
                        got = micro.sums.get(f"{who}/{side}", np.zeros(0))
                        wanted = np.array([tokens[sample, side].sum() for sample in micro.samples])
                        wrong = self._given("sums, given the tokens", got, wanted)
                        if wrong is not None:
                            what = f"{who}, sum of pair {micro.samples[wrong]}, {side}, on rank {trace.rank}"
                            yield self.found(LOGPS, Clue.SUMS, what, got[wrong], wanted[wrong])

    def _given(self, quantity: str, got: Array, wanted: Array, least: float = 0.1) -> int | None:
        """The first place where what follows by arithmetic does not follow, relative to values of `least` and up."""
        if len(got) != len(wanted):
            return 0
        if not len(got):
            return None
        apart = np.abs(got - wanted) / np.maximum(least, np.abs(wanted))
        exceeds = self.whole.gauge.exceeds(quantity, float(apart.max()), self.whole.allowed.given)
        return int(np.flatnonzero(~(apart <= self.whole.allowed.given))[0]) if exceeds else None

    # ---- loss ----

    def losses(self) -> Iterator[Finding]:
        world, count = len(self.whole.traces), len(self.expected.samples)
        for trace in self.whole.traces:
            micros = trace.steps[self.place].micros
            for place, micro in enumerate(micros):
                wanted = textbook.preference_losses(self.whole.loss, micro.sums)
                assert micro.losses_P is not None
                wrong = self._given("losses, given the sums", micro.losses_P, wanted)
                if wrong is not None:
                    what = f"loss of pair {micro.samples[wrong]}, given its log-probabilities"
                    yield self.found(LOSS, Clue.LOSSES, what, micro.losses_P[wrong], wanted[wrong])
                yield from self._slopes(micro)
                where = f"micro-batch {place + 1} on rank {trace.rank}"
                handed = float(micro.losses_P.sum()) * world / count
                got = math.nan if micro.handed is None else micro.handed
                if self._given("loss handed to the engine", np.array([got]), np.array([handed])) is not None:
                    note = f"the sum of its losses × {world} ranks / {count} pairs" + _factor(got, handed)
                    yield self.found(LOSS, Clue.HANDED, f"loss handed to the engine, {where}", got, handed, note)
                if micro.last is not (place + 1 == len(micros)):
                    what = f"mark of the last micro-batch, {where}"
                    yield self.found(LOSS, Clue.HANDED, what, micro.last, not micro.last)
        yield from self._mean_loss()

    def _slopes(self, micro: Micro) -> Iterator[Finding]:
        for side, wanted in textbook.preference_slopes(self.whole.loss, micro.sums).items():
            wrong = self._given("derivatives of losses, given the sums", micro.slopes[side], wanted)
            if wrong is not None:
                what = f"derivative of the loss of pair {micro.samples[wrong]} by its {side} log-probability"
                yield self.found(LOSS, Clue.SLOPES, what, micro.slopes[side][wrong], wanted[wrong])

    def mean_loss(self) -> float:
        """Of the train batch, from the losses of its pairs."""
        return float(np.mean(joined([m.losses_P for _, _, m in self.micros() if m.losses_P is not None])))

    def _mean_loss(self) -> Iterator[Finding]:
        got, wanted, allowed = self.mean_loss(), self.expected.loss, self.whole.allowed
        sizes = [
            abs(float(values[sample, side].sum()))
            for values in (self.expected.policy, self.expected.reference)
            for sample in self.expected.samples
            for side in SIDES
        ]
        margin = self.whole.loss.beta * sum(sizes) / len(self.expected.losses)
        bound = self.drift * (allowed.loss + allowed.loss_of_sums * margin / (abs(wanted) or 1.0))
        apart = abs(got - wanted) / (abs(wanted) or 1.0)
        if self.whole.gauge.exceeds("loss", apart, bound):
            yield self.found(LOSS, Clue.POLICY, "loss of the train batch", got, wanted)

    # ---- gradient ----

    def gradient(self) -> Iterator[Finding]:
        ran, meant = self.whole.ran, self.whole.meant
        names, wanted = ran.names("gradient", self.number), meant.names("gradient", self.number)
        there = {True: "is trained", False: "is frozen"}
        for name in sorted(set(names) ^ set(wanted)):
            yield self.found(GRADIENT, Clue.TRAINED, name, there[name in names], there[name in wanted])
        sizes = [size_of(ran.read("gradient", self.number, n), meant.read("gradient", self.number, n), n)
                 for n in wanted if n in names]  # fmt: skip
        apart = shares(sizes)
        largest = max(apart, key=lambda share: math.inf if math.isnan(share) else share)
        whole = math.sqrt(sum(size.wanted**2 for size in sizes)) or 1.0
        self.whole.gauge.exceeds("gradient, whole", math.sqrt(sum(size.apart**2 for size in sizes)) / whole, math.inf)
        bound = self.whole.allowed.gradient * self.drift
        if self.whole.gauge.exceeds("gradient of a parameter", largest, bound):
            wrong = [size for size, share in zip(sizes, apart, strict=True) if not share <= bound]
            worst = sizes[apart.index(largest)]
            note = f"{len(wrong)} of {len(sizes)} parameters differ" + common_factor(wrong)
            what = f"{worst.name} (‖difference‖ / ‖gradient‖ = {worst.apart / (worst.wanted or 1.0):.2g}), norm"
            yield self.found(GRADIENT, Clue.GRADIENT, what, worst.got, worst.wanted, note)
        yield from self._ranks_agree("gradient", GRADIENT)

    def _ranks_agree(self, kind: str, stage: str) -> Iterator[Finding]:
        first = getattr(self.steps[0], f"{kind}_marks")
        for trace, step in zip(self.whole.traces[1:], self.steps[1:], strict=True):
            marks = getattr(step, f"{kind}_marks")
            for name in first:
                if marks.get(name) != first[name]:
                    what = f"{name} on rank {trace.rank}"
                    yield self.found(stage, Clue.RANKS, what, "another value", "what rank 0 has, to the bit")
                    return

    # ---- optimizer ----

    def optimizer(self) -> Iterator[Finding]:
        allowed = self.whole.allowed
        for name in ("lr", "train/learning_rate"):
            got = self.steps[0].lr if name == "lr" else self.steps[0].row.get(name, math.nan)
            if self._given("learning rate", np.array([got]), np.array([self.expected.lr]), 1e-300) is not None:
                yield self.found(OPTIMIZER, Clue.RATE, "learning rate", got, self.expected.lr)
        own = math.sqrt(sum(float((np.asarray(self.whole.ran.read("gradient", self.number, n), np.float64) ** 2).sum())
                            for n in self.whole.ran.names("gradient", self.number)))  # fmt: skip
        got = self.steps[0].row.get("train/grad_norm", math.nan)
        if self.whole.gauge.exceeds("norm, given the gradient", abs(got - own) / (own or 1.0), allowed.norm):
            yield self.found(OPTIMIZER, Clue.NORM, "norm of the gradient", got, own, _factor(got, own).lstrip("; "))
        yield from self._weights()
        yield from self._ranks_agree("weight", OPTIMIZER)

    def _weights(self) -> Iterator[Finding]:
        """Given the gradient the step is exact. What rounding in the gradient does to Adam's division, where a
        gradient is nothing but rounding, is no defect: such a difference is measured, and not held against the run."""
        given = self.whole.given_weights[self.place]
        ran, meant, allowed = self.whole.ran, self.whole.meant, self.whole.allowed
        if missing := set(meant.names("weights", self.number)) - set(ran.names("weights", self.number)):
            yield self.found(OPTIMIZER, Clue.WEIGHTS, sorted(missing)[0], "no weights: no step was taken", "a step")
            return
        of_step, of_weight = allowed.updated
        wrong = {}
        for name, update in given.items():
            bound = of_step * update.step + of_weight * update.weight
            self.whole.gauge.exceeds("weights, given the gradient", update.apart / (update.weight or 1.0), math.inf)
            if not update.apart <= bound:
                wrong[name] = update.apart / (bound or 1e-300)
        for name in meant.names("weights", self.number):
            ours, theirs = ran.read("weights", self.number, name), meant.read("weights", self.number, name)
            self.whole.gauge.exceeds("weights after the step", relative(ours, theirs), allowed.weights)
        if wrong:
            name = max(wrong, key=lambda each: wrong[each])
            ours, theirs = ran.read("weights", self.number, name), meant.read("weights", self.number, name)
            note = f"{len(wrong)} of {len(given)} parameters differ"
            yield self.found(OPTIMIZER, Clue.WEIGHTS, f"{name}, its worst element", *_worst(ours, theirs), note)

    # ---- metrics ----

    def metrics(self) -> Iterator[Finding]:
        rel, absolute = (allowed * self.drift for allowed in self.whole.allowed.metric)
        yield from self._values()
        counted = self.counted()
        for rank, step in enumerate(self.steps):
            row = step.row
            for name, wanted in self.expected.row.items():
                if name not in row:
                    yield self.found(METRICS, Clue.ABSENT, name, "is not logged", wanted)
                    continue
                got = float(row[name])
                clue = Clue.REDUCED if name in counted or name.startswith("eval/") else Clue.POSITION
                if name in counted and self._given("metrics, given their parts", np.array([got]),
                                                   np.array([counted[name]])) is not None:  # fmt: skip
                    note = f"on rank {rank}" + _factor(got, counted[name])
                    yield self.found(METRICS, clue, name, got, counted[name], note)
                scale = max(abs(got), abs(wanted))
                apart = abs(got - wanted)
                if self.whole.gauge.exceeds(name, apart / (scale or 1.0), math.inf) or apart > rel * scale + absolute:
                    note = f"on rank {rank}" + _factor(got, wanted)
                    yield self.found(METRICS, clue, name, got, wanted, note)

        yield from self._layouts_own()

    def _values(self) -> Iterator[Finding]:
        for _, _, micro in self.micros():
            wanted = textbook.rewards(self.whole.loss, micro.sums)
            for name, got in micro.values_P.items():
                if name in wanted and (wrong := self._given(name, got, wanted[name])) is not None:
                    what = f"{name} of pair {micro.samples[wrong]}, given its log-probabilities"
                    yield self.found(METRICS, Clue.VALUES, what, got[wrong], wanted[name][wrong])
        for key, got in self.by_sequence("logits_t").items():
            wanted_n = self.expected.logits[key]
            apart = float((np.abs(got - wanted_n) / np.maximum(1.0, np.abs(wanted_n))).max())
            if self.whole.gauge.exceeds("mean logit at a token", apart, self.whole.allowed.logp * self.drift):
                what = f"mean logit at the worst token of pair {key[0]}, {key[1]}"
                yield self.found(METRICS, Clue.LOGITS, what, *_worst(got, wanted_n))

    def _layouts_own(self) -> Iterator[Finding]:
        """What a layout has for itself, where it can be counted."""
        seen = [step.micros for step in self.steps]
        held = [sum(len(m.tokens_t) for m in micros if m.tokens_t is not None) for micros in seen]
        for name, wanted in (
            ("train/micro_batches", max(len(micros) for micros in seen)),
            ("train/grad_acc", self.whole.cfg.train.grad_acc),
            ("train/ring_tokens", max(held)),
        ):
            got = self.steps[0].row.get(name, wanted)
            if got != wanted:
                clue = Clue.REDUCED if name == "train/ring_tokens" else Clue.POSITION
                yield self.found(METRICS, clue, name, got, wanted)

    def counted(self) -> dict[str, float]:
        """The logged values of the batch, from what the run itself had for each pair and token."""
        micros = [micro for _, _, micro in self.micros()]
        sums = {name: joined([m.sums[name] for m in micros if name in m.sums]) for name in micros[0].sums}
        values = {name: joined([m.values_P[name] for m in micros]) for name in micros[0].values_P}
        tokens = self.by_sequence("logits_t")
        logits = {side: joined([v for (_, of), v in tokens.items() if of == side]) for side in SIDES}
        real = sum(micro.real_tokens for trace in self.whole.traces for micro in trace.steps[self.place].micros)
        losses = joined([m.losses_P for m in micros if m.losses_P is not None])
        row = textbook.logged(losses, sums, values, logits, real)
        return {f"train/{name}": value for name, value in row.items()}


@dataclass(frozen=True)
class Size:
    """Norms of a parameter's gradient, of the reference's, and of their difference; and the factor between them."""

    name: str
    got: float
    wanted: float
    apart: float
    factor: float
    residue: float  # what remains when the factor is taken out, relative


def size_of(got: Array, wanted: Array, name: str) -> Size:
    ours, theirs = np.asarray(got, np.float64).reshape(-1), np.asarray(wanted, np.float64).reshape(-1)
    size, norm = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    factor = float(ours @ theirs) / (norm * norm) if norm else math.nan
    residue = float(np.linalg.norm(ours - factor * theirs)) / (size or 1.0)
    return Size(name, size, norm, float(np.linalg.norm(ours - theirs)), factor, residue)


def shares(sizes: Sequence[Size]) -> list[float]:
    """‖a − b‖ / ‖b‖ of each parameter. A thousandth of the whole gradient is added to ‖b‖: some gradients are nothing
    but rounding, as that of a bias of keys, which a softmax does not see."""
    whole = math.sqrt(sum(size.wanted**2 for size in sizes))
    return [size.apart / (size.wanted + 1e-3 * whole or 1.0) for size in sizes]


def common_factor(sizes: Sequence[Size]) -> str:
    """In words, where all gradients are off by one and the same factor."""
    factors = [size.factor for size in sizes if size.wanted]
    if not factors or any(not size.residue < 1e-2 for size in sizes if size.wanted):
        return ""
    low, high = min(factors), max(factors)
    factor = float(np.median(factors))
    if not low > 0 or high / low > 1.01 or abs(factor - 1) < 1e-3:
        return ""
    return f"; all are {factor:.3f} times too large" if factor > 1 else f"; all are {factor:.4g} of what they should be"


def not_held(row: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Logged values that nothing here recomputes, other than those that a layout has for itself."""
    return [name for name in row if name not in expected and not name.startswith(OWN)]


def relative(got: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(got - wanted).max()) / (float(np.abs(wanted).max()) or 1.0)


def _rows(*columns: Array | None) -> Array:
    tokens, targets, positions, owners = (np.asarray(column, dtype=np.int64) for column in columns)
    return np.stack((tokens, np.where(owners >= 0, targets, 0), positions, owners), axis=1)


def _worst(got: Array, wanted: Array) -> tuple[str, str]:
    if got.shape != wanted.shape:
        return f"shape {got.shape}", f"shape {wanted.shape}"
    place = int(np.nanargmax(np.where(np.isfinite(got), np.abs(got - wanted), np.inf)))
    return _shown(float(got.reshape(-1)[place])), _shown(float(wanted.reshape(-1)[place]))


def _shown(value: Any) -> str:
    return f"{float(value):.12g}" if isinstance(value, float | np.floating) else str(value)


def _factor(got: float, wanted: float) -> str:
    """A factor that is nearly a small whole number or its inverse says what went wrong."""
    if not wanted or not math.isfinite(got) or got / wanted <= 0:
        return ""
    factor = got / wanted
    for number, words in ((factor, "{:.0f} times too large"), (1 / factor, "a {:.0f}th of it")):
        if number > 1.5 and abs(number - round(number)) < 1e-6 * number:
            return "; " + words.format(number)
    return ""
