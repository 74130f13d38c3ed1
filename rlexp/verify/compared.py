"""A recorded run beside the reference: the whole run, and one step of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import EXAMPLE, SIDES
from rlexp.verify.findings import Allowed, Clue, Finding, Gauge, shown
from rlexp.verify.norms import relative
from rlexp.verify.records import (
    MISMATCHED,
    Array,
    Asked,
    Expected,
    Key,
    Micro,
    StepSeen,
    TensorFiles,
    TokenExample,
    Trace,
    Update,
    joined,
)
from rlexp.verify.reference import rules


@dataclass
class Comparison:
    """A recorded run, the reference, and the differences that rounding may cause."""

    cfg: Config
    traces: Sequence[Trace]  # by rank
    expected: Expected
    ran: TensorFiles  # gradients and weights of the run
    meant: TensorFiles  # and of the reference
    given_weights: Sequence[Mapping[str, Update]]  # see `reference/optimizer.py`
    allowed: Allowed
    gauge: Gauge = field(default_factory=Gauge)

    def given(self, complete: Callable[[Any], bool]) -> Any:
        """What the run gave to the loss's formula: of each step its sums, and what else is counted. `complete` says
        whether a step has the data that it must have; where one has not, that is the first difference."""
        steps = itertools.takewhile(complete, self.steps())
        return [(step.sums(), step.expected.counts) for step in steps]

    def apply_formula(self, given: Any) -> None:
        """Keep, for each micro-batch, what the formula alone makes of the sums of its step's whole train batch."""
        for step, whole in zip(self.steps(), given, strict=False):
            for head, place, micro in step.micros():
                mine = [step.expected.samples.index(sample) for sample in micro.samples]
                for trace in self.ring(head):
                    trace.steps[step.place].micros[place].given = whole[mine]

    @property
    def sides(self) -> tuple[str, ...]:
        """The answers of an example."""
        return SIDES[self.cfg.loss.rows]

    @property
    def asks(self) -> Asked:
        return self.expected.asks

    @property
    def word(self) -> str:
        """The name of an example."""
        return EXAMPLE[self.cfg.loss.rows]

    def heads(self) -> list[Trace]:
        """The first rank of each replica."""
        return [trace for trace in self.traces if trace.ring_rank == 0]

    def ring(self, head: Trace) -> list[Trace]:
        return [trace for trace in self.traces if trace.replica == head.replica]

    def steps(self) -> Iterator[ComparedStep]:
        taken = len(self.traces[0].steps)  # fewer if the run refused one
        for place, expected in enumerate(self.expected.steps[:taken]):
            yield ComparedStep(self, expected, place, [trace.steps[place] for trace in self.traces])


@dataclass
class ComparedStep:
    """One optimizer step of a comparison."""

    whole: Comparison
    expected: Any  # RowsExpected, or DrawnExpected
    place: int  # from 0
    seen: Sequence[StepSeen]  # by rank

    @property
    def number(self) -> int:
        return self.expected.number

    @cached_property
    def drift(self) -> float:
        """Factor by which tolerances grow, because the weights before this step differ by more than is allowed.

        Each earlier step was right, given its gradient. But Adam divides by the size of a gradient even where that size
        is nothing but rounding, and a large learning rate multiplies the result. Such a difference is no defect, and
        values computed with such weights may differ by the same factor: at least 1, at most 10,000.
        """
        ran, meant, before = self.whole.ran, self.whole.meant, self.number - 1
        apart = max(relative(ran.read("weights", before, n), meant.read("weights", before, n))
                    for n in meant.names("weights", before))  # fmt: skip
        return min(1e4, max(1.0, apart / self.whole.allowed.weights))

    @property
    def apart(self) -> float:
        """How far the weights after the step lie from the reference's."""
        names = self.whole.meant.names("weights", self.number)
        return max(relative(*self.both("weights", name)) for name in names)

    @property
    def slack(self) -> float:
        """How far gradients may differ, relatively, because the loss's derivatives do."""
        return 0.0

    def micros(self, of: str = "micros") -> Iterator[tuple[Trace, int, Micro]]:
        """The micro-batches of each replica, as its first rank saw them; or those with mismatched answers, `others`."""
        for head in self.whole.heads():
            for place, micro in enumerate(getattr(head.steps[self.place], of)):
                yield head, place, micro

    @property
    def taken(self) -> list[int]:
        """The samples of all replicas' micro-batches, one after the other."""
        return self.taken_by("micros")

    def taken_by(self, of: str) -> list[int]:
        return [sample for _, _, micro in self.micros(of) for sample in micro.samples]

    def in_order(self, parts: Sequence[Array]) -> Array:
        """Join values of the micro-batches' samples, one for each, in the order of the train batch."""
        values, taken = joined(parts), self.taken
        if sorted(taken) != sorted(self.expected.samples) or len(values) != len(taken):
            return values  # the data stage has found it
        places = {sample: place for place, sample in enumerate(taken)}  # one that is there twice has its values twice
        return values[[places[sample] for sample in self.expected.samples]]

    def sums(self) -> dict[str, Array]:
        """The sums that the run computed, of the whole train batch."""
        micros = [micro.sums for _, _, micro in self.micros()]
        sums = {name: self.in_order([sums[name] for sums in micros if name in sums]) for name in micros[0]}
        mismatched = next((micro.mismatched for _, _, micro in self.micros()), None)
        return sums if mismatched is None else sums | {MISMATCHED: mismatched}

    def log_ratios_of_others(self) -> tuple[Array, Array]:
        """The log-ratios of mismatched answers by the run's tokens, and the sizes of the sums whose differences these
        are; NaN if the tokens are others, which is found before."""
        expected = self.expected.others
        for seen in self.seen:
            if any(len(got.sequence("answer")) != len(expected[sample].sequence("answer"))
                   for sample, got in seen.other_tokens.items()):  # fmt: skip
                return np.full(len(expected), np.nan), np.ones(len(expected))
        policy, reference = (
            {key: found[key] for sample in self.expected.samples for key in [(sample, "answer")] if key in found}
            for who in ("policy", "reference")
            for found in [self.by_sequence(f"{who}_n", of="others")]
        )
        return rules.log_ratios(policy, reference), rules.sizes_of_log_ratios(policy, reference)

    def finding(self, stage: str, clue: Clue, quantity: str, got: Any, expected: Any, note: str = "") -> Finding:
        return Finding(self.number, stage, clue, quantity, shown(got), shown(expected), note)

    def examples(self, of: str) -> Mapping[int, TokenExample]:
        """The reference's examples of the step's micro-batches."""
        return self.expected.others if of == "others" else self.whole.expected.tokens

    def by_sequence(self, values: str, of: str = "micros") -> dict[Key, Array]:
        """Values of each answer's trained tokens, put together from the ring. What no rank computed stays NaN.

        Of scores there is one for each answer, which the ring has put together already.
        """
        if self.whole.asks.scores:
            return self._scores() if values == "policy_n" else {}
        whole: dict[Key, Array] = {}
        expected = self.examples(of)
        for head, place, micro in self.micros(of):
            parts = {
                (sample, side): np.full(len(expected[sample].ids(side)), np.nan)
                for sample in micro.samples
                for side in self.whole.sides
            }
            for trace in self.whole.ring(head):
                mine = getattr(trace.steps[self.place], of)[place]
                got, owner, position = mine.column(values), mine.sequence_n, mine.position_n
                if got is None or position is None:
                    continue
                for number, (sample, side) in enumerate(parts):
                    at = np.flatnonzero(owner == number)
                    first = len(expected[sample].prompt) - 1
                    parts[sample, side][position[at] - first] = got[at]
            whole |= {(sample, side): part[expected[sample].trained(side)] for (sample, side), part in parts.items()}
        return whole

    def _scores(self) -> dict[Key, Array]:
        sums, samples = self.sums(), self.expected.samples
        return {(sample, side): sums[f"policy/{side}"][place : place + 1]
                for place, sample in enumerate(samples) for side in self.whole.sides}  # fmt: skip

    def both(self, kind: str, name: str) -> tuple[Array, Array]:
        """A parameter's tensor in this step: the run's, and the reference's."""
        return self.whole.ran.read(kind, self.number, name), self.whole.meant.read(kind, self.number, name)

    def first_wrong(
        self, quantity: str, got: Array, wanted: Array, least: float | Array = 0.1, allowed: float | None = None
    ) -> int | None:
        """The first place where a value differs from what the run's earlier values give by arithmetic.

        The difference is relative to the value, or to `least` if the value is smaller."""
        if len(got) != len(wanted):
            return 0
        if not len(got):
            return None
        apart = np.abs(got - wanted) / np.maximum(least, np.abs(wanted))
        allowed = self.whole.allowed.given if allowed is None else allowed
        exceeds = self.whole.gauge.exceeds(quantity, float(apart.max()), allowed)
        return int(np.flatnonzero(~(apart <= allowed))[0]) if exceeds else None

    @property
    def scale(self) -> float:
        """The size of the loss."""
        return abs(float(self.expected.loss))

    def said(self) -> tuple[dict[str, dict[Key, Array]], dict[str, dict[Key, Array]]]:
        """What the models say of each token, in the run and in the reference."""
        ours, theirs = {"policy": self.by_sequence("policy_n")}, {"policy": self.expected.policy}
        if self.expected.reference:
            ours["reference model"] = self.by_sequence("reference_n")
            theirs["reference model"] = self.expected.reference
        return ours, theirs

    def alike(self, other: ComparedStep) -> bool:  # noqa: ARG002
        """Whether another run has the same examples in this step."""
        return True

    def mean_loss(self) -> float:
        """The loss of the train batch, from the losses of its examples."""
        return float(np.mean(joined([m.losses.losses_E for _, _, m in self.micros() if m.losses is not None])))


def value_at(values: Array, place: int) -> Any:
    """Return a value to show, also where the run has returned none."""
    return values[place] if place < len(values) else "is not returned"
