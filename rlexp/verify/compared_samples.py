"""A recorded run that drew its own samples beside the reference: its rollouts, put together from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rlexp.config.schema.models import Precision
from rlexp.verify.compared import ComparedStep, Comparison
from rlexp.verify.records import Array, DrawnExpected, Key, RolloutSeen, Terms, TokenAnswer, TokenExample, Trace
from rlexp.verify.reference.drawn import SIDE, Rollout, batch_of, divergences_of, examples_with
from rlexp.verify.reference.policy_formula import SAID, Answers, GivenToFormulas, JudgedAgain

CRITIC = "critic"
HELD_OUT = "policy as it answered held-out prompts"
SCORED = {"reference model": "reference", "policy as it generated": "behaviour", "policy as it was scored": "old",
          "critic as it was scored": "values"}  # fmt: skip
SLACK = 10.0  # a parameter's gradient may move by more than its share of the derivatives: its terms cancel
COLUMNS = {"policy": "policy_n", "entropies": "entropies_n", "values": "values_n"}


@dataclass(frozen=True)
class RunRollout:
    """A rollout of the run, with its samples by their places."""

    drawn: Rollout
    seen: Sequence[RolloutSeen]  # by rank

    @property
    def number(self) -> int:
        return self.drawn.number

    def __getattr__(self, name: str) -> list[Array] | None:
        """What the run knows of each sample: `old`, `reference`, `advantages`, `counts`, …"""
        known = [getattr(sample, name) for sample in self.drawn.samples]
        return None if any(each is None for each in known) else known


def rollouts_of(traces: Sequence[Trace]) -> list[RunRollout]:
    """Put the rollouts of a run together, as far as every sample is there once."""
    made = []
    complete = min(len(trace.rollouts) for trace in traces)
    for number, first in enumerate(traces[0].rollouts[:complete]):
        seen = [trace.rollouts[number] for trace in traces]
        samples = sorted((sample for each in seen for sample in each.samples), key=lambda sample: sample.place)
        made.append(RunRollout(Rollout(first.number, samples), seen))
    return made


def held_rollout_of(traces: Sequence[Trace]) -> Rollout | None:
    """Put the answers to held-out prompts together."""
    parts = [trace.held_rollout for trace in traces if trace.held_rollout is not None]
    samples = sorted((sample for part in parts for sample in part), key=lambda sample: sample.place)
    return Rollout(-1, samples) if samples else None


@dataclass
class SamplesComparison(Comparison):
    """A recorded run that drew its own samples."""

    rollouts: list[RunRollout] = field(default_factory=list)
    again: JudgedAgain = field(default_factory=lambda: JudgedAgain([], []))

    def __post_init__(self) -> None:
        self.rollouts = rollouts_of(self.traces)

    @property
    def sides(self) -> tuple[str, ...]:
        return (SIDE,)

    @property
    def word(self) -> str:
        return "sample"

    def steps(self) -> Iterator[SampleStep]:
        taken = len(self.traces[0].steps)  # fewer if the run refused one
        for place, expected in enumerate(self.expected.steps[:taken]):
            yield SampleStep(self, expected, place, [trace.steps[place] for trace in self.traces])

    def given(self, complete: Callable[[SampleStep], bool]) -> GivenToFormulas:
        rollouts, steps = [], []
        for run in self.rollouts:
            scores = np.array([sample.score for sample in run.drawn.samples])
            kl = divergences_of(self.cfg, run.old or [], run.reference)
            rollouts.append((scores, kl, run.values, run.seen[0].kl_coef))
        for step in self.steps():
            if not complete(step):  # other samples, or other tokens: that is the first difference
                break
            steps.append((step.given_answers(), step.run.seen[0].kl_coef))
        return GivenToFormulas(rollouts, steps, double=self.cfg.train.precision is Precision.fp64)

    def apply_formula(self, given: JudgedAgain) -> None:
        self.again = given


class SampleStep(ComparedStep):
    """One step of a run that drew its own samples."""

    whole: SamplesComparison
    expected: DrawnExpected

    @property
    def run(self) -> RunRollout:
        """The run's rollout that the step's samples come from."""
        return self.whole.rollouts[self.expected.rollout.number]

    @property
    def begins(self) -> bool:
        """Whether it is the first step on its rollout."""
        return self.expected.rollout.step == self.number

    @property
    def drift(self) -> float:
        """The reference goes on from the run's weights, so tolerances need not grow."""
        return 1.0

    @property
    def apart(self) -> float:
        """The largest after any step, from the weights with which both began it."""
        return self.whole.expected.apart

    @property
    def slack(self) -> float:
        """Where no score has a signal, the loss's derivative is the divergence's alone. While the policy has hardly
        left the reference, that is a difference of two log-probabilities, whose rounding is a large part of it."""
        ours, theirs = (np.concatenate(list(each.slopes.values())) for each in (self.again, self.expected.terms))
        size = float(np.abs(theirs).sum())
        return SLACK * float(np.abs(ours - theirs).sum()) / size if size and len(ours) == len(theirs) else 0.0

    @cached_property
    def tokens(self) -> Mapping[int, TokenAnswer]:
        every = examples_with(self.expected.rollout, self.run.drawn)
        return {place: every[place] for place in self.expected.samples}

    def examples(self, of: str) -> Mapping[int, TokenExample]:  # noqa: ARG002
        return self.tokens

    @property
    def again(self) -> Terms:
        """What the formula makes of the run's own values, applied to the whole train batch."""
        return self.whole.again.steps[self.place]

    def given_answers(self) -> Answers:
        """The step's train batch from the run's own values, weighed and whitened by the reference's rules."""
        now = {}
        for name in SAID:
            columns = self.by_sequence(COLUMNS[name])
            if not any(np.isnan(each).all() for each in columns.values()):
                now[name] = [columns[place, SIDE] for place in self.expected.samples]
        return batch_of(self.whole.cfg, self.run, self.expected.samples, now)

    @property
    def scale(self) -> float:
        return self.expected.scale

    def said(self) -> tuple[dict[str, dict[Key, Array]], dict[str, dict[Key, Array]]]:
        """Return what policy and critic say now; where a rollout begins, also what was said of all its samples."""
        ours, theirs = {"policy": self.by_sequence("policy_n")}, {"policy": self.expected.policy}
        if self.expected.values:
            ours[CRITIC], theirs[CRITIC] = self.by_sequence("values_n"), self.expected.values
        held, answers = self.whole.expected.held_rollout, held_rollout_of(self.whole.traces)
        if held is not None and answers is not None and self.number == self.whole.expected.steps[-1].number:
            for side, values in ((ours, [each.behaviour for each in answers.samples]), (theirs, held.behaviour)):
                side[HELD_OUT] = {(place, SIDE): each for place, each in enumerate(values)}
        for words, name in SCORED.items() if self.begins else ():
            meant, got = getattr(self.expected.rollout, name), getattr(self.run, name)
            if meant is not None and got is not None:
                for side, values in ((ours, got), (theirs, meant)):
                    side[words] = {(place, SIDE): each for place, each in enumerate(values)}
        return ours, theirs

    def alike(self, other: ComparedStep) -> bool:
        """Whether another run has drawn the same samples, with the same scores: rounding may make it draw others, and a
        reward function may answer otherwise."""
        assert isinstance(other, SampleStep)
        if other.number != self.number:
            return False
        pairs = zip(self.run.drawn.samples, other.run.drawn.samples, strict=True)
        return all(np.array_equal(ours.answer, theirs.answer) and ours.score == theirs.score for ours, theirs in pairs)

    def total(self, name: str = "loss") -> float:
        """A part of the loss of the train batch, or all of it, from what every rank made of its tokens."""
        whole = 0.0
        for trace in self.whole.traces:
            for micro in trace.steps[self.place].micros:
                terms = micro.terms
                assert terms is not None
                replicated = sum(terms.replicated.values()) if name == "loss" else terms.replicated.get(name, 0.0)
                own = terms.loss - replicated if name == "loss" else terms.weighted.get(name, 0.0)
                whole += own + (replicated if trace.ring_rank == 0 else 0.0)
        return whole

    def mean_loss(self) -> float:
        return self.total()
