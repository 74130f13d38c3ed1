"""Record training on samples that the policy draws: the product's own task, its rollouts and its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.training.algos.build import build_policy_loss
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTerms, PolicyTokens
from rlexp.training.reference.base import Reference
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.sinks.base import RolloutFacts
from rlexp.training.train.build_rollouts import Parts
from rlexp.training.train.examples import read_examples
from rlexp.training.train.parts import Run
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.rollout_task import HeldSamples, RolloutStep, RolloutTask
from rlexp.training.types import Sample
from rlexp.training.world.groups import World
from rlexp.verify.recorder import Recorder, array, recorded_run
from rlexp.verify.records import Array, Drawn, Micro, RolloutSeen, Terms, TokenAnswer

SAID = {"policy": "logps_n", "entropies": "entropy_n", "values": "values_n"}
KNOWN = ("old_n", "behaviour_n", "reference_n", "advantages_n", "old_values_n", "returns_n", "weight_n", "trained_n")


class SampleRecorder(Recorder):
    """Knows which rollout is drawn, and what its samples are worth."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outcomes: dict[str, Array] = {}
        self.credit: Array | None = None

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Record nothing of the passes that draw and score."""
        self.held = None
        yield

    def drawn(self, rollouts: Rollouts, step: int) -> None:
        """Record a rollout that is complete."""
        self.trace.rollouts.append(RolloutSeen(
            number=rollouts.number, step=step, kl_coef=rollouts.kl_coef,
            samples=[drawn_of(sample) for sample in rollouts.mine], outcomes=self.outcomes, credit=self.credit,
        ))  # fmt: skip

    def begin(self, samples: Sequence[Sample]) -> None:
        self.held = Micro(tuple(sample.place for sample in samples))
        if not self.step.trained:
            self.step.micros.append(self.held)
        self.step.tokens.update(
            {s.place: TokenAnswer(array_of(s.prompt.tokens), array_of(s.answer), s.prompt.origin) for s in samples}
        )

    def judged(
        self, tokens: PolicyTokens, terms: PolicyTerms, kl_coef: float, slopes: Mapping[str, Tensor], configured: float
    ) -> None:
        """Record what the loss was given of a micro-batch's tokens on this rank, and what it has made of them."""
        micro = self.micro
        for name in KNOWN:
            values = getattr(tokens, name)
            if values is not None:
                micro.known[name] = array(values)
        micro.known |= {"answer_weights": array(tokens.weight_S), "lengths": array(tokens.length_S),
                        "sums": array(tokens.by_sequence(tokens.logps_n.detach()))}  # fmt: skip
        micro.known |= {f"slope of {name}": array(slope) for name, slope in slopes.items()}
        micro.terms = Terms(
            loss=float(terms.loss.detach()),
            weighted={name: float(each) for name, each in terms.weighted.items()},
            replicated={name: float(each) for name, each in terms.replicated.items()},
            means={name: array(each) for name, each in terms.means_n.items()},
            peaks={name: array(each) for name, each in terms.peaks_n.items()},
            slopes={},
            kl_coef=kl_coef,
            configured=configured,
        )


def slopes_of(loss: PolicyLoss, tokens: PolicyTokens, kl_coef: float) -> dict[str, Tensor]:
    """The derivatives of this rank's part of the loss by what the models say of its tokens.

    The formula is applied once more: DeepSpeed would take a derivative by a model's output for the backward pass."""
    said = {
        name: values.detach().requires_grad_()
        for name, field in SAID.items()
        if (values := getattr(tokens, field)) is not None and values.requires_grad
    }
    with torch.enable_grad():
        terms = loss(replace(tokens, **{SAID[name]: values for name, values in said.items()}), kl_coef)
        if not terms.loss.requires_grad:  # no token of this rank counts
            return {name: torch.zeros_like(values) for name, values in said.items()}
        slopes = torch.autograd.grad(terms.loss, list(said.values()), allow_unused=True)
    return {name: torch.zeros_like(said[name]) if slope is None else slope
            for name, slope in zip(said, slopes, strict=True)}  # fmt: skip


def array_of(tokens: Any) -> Array:
    """Copy tokens, as wide as the reference has them."""
    found: Array = tokens.astype("int64")
    return found


def drawn_of(sample: Sample) -> Drawn:
    return Drawn(
        place=sample.place, index=sample.prompt.index, prompt=array_of(sample.prompt.tokens),
        origin=sample.prompt.origin, answer=array_of(sample.answer), stopped=sample.stopped, text=sample.text,
        behaviour=sample.behaviour, terms=dict(sample.terms), score=sample.score, old=sample.old,
        reference=sample.reference, values=sample.values, advantages=sample.advantages, returns=sample.returns,
        counts=sample.counts,
    )  # fmt: skip


class RecordedRollouts(Rollouts):
    """The product's rollouts, recorded when they are complete."""

    recorder: SampleRecorder
    evaluates = False

    @classmethod
    def by(cls, recorder: SampleRecorder, **parts: Any) -> RecordedRollouts:
        made = cls(**parts)
        made.recorder = recorder
        return made

    def ensure(self, step: int) -> Made | None:
        with self.recorder.drawing():
            made = super().ensure(step)
        if made is not None:
            self.recorder.drawn(self, step)
        self.recorder.step.rollout = self.number
        return made

    def _refuse(self, values: dict[str, float]) -> None:
        """Go on with samples of another model, since it is to be found out why they are."""

    def evaluate(self) -> dict[str, float]:
        self.evaluates = True
        with self.recorder.drawing():
            return super().evaluate()

    def _collect(self, mine: Sequence[Sample], model_scores: dict[str, list[float]]) -> None:
        super()._collect(mine, model_scores)
        if self.evaluates:
            self.evaluates = False
            self.recorder.trace.held_rollout = [drawn_of(sample) for sample in mine]


class RecordedPolicyLoss:
    """Records what the formula of a policy loss is given, and what it makes of it."""

    def __init__(self, loss: PolicyLoss, configured: PolicyLoss, recorder: SampleRecorder) -> None:
        self._loss, self._configured, self._recorder = loss, configured, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        credit_N = self._loss.credit(outcomes, kl_coef)
        self._recorder.outcomes = {"scores": array(outcomes.scores_N), "divergences": array(outcomes.kl_N),
                                   "prompts": array(outcomes.group_N)}  # fmt: skip
        self._recorder.credit = array(credit_N)
        return credit_N

    def __call__(self, tokens: PolicyTokens, kl_coef: float) -> PolicyTerms:
        terms = self._loss(tokens, kl_coef)
        with torch.no_grad():
            configured = float(self._configured(tokens, kl_coef).loss)
        self._recorder.judged(tokens, terms, kl_coef, slopes_of(self._loss, tokens, kl_coef), configured)
        return terms


class RecordedRolloutTask(RolloutTask):
    """The product's task, with wrapped parts. Only the first `held_out` held-out prompts are answered."""

    recorder: SampleRecorder

    def watched_by(self, recorder: SampleRecorder, configured: PolicyLoss) -> RecordedRolloutTask:
        self.recorder = recorder
        self.loss: Any = RecordedPolicyLoss(self.loss, configured, recorder)
        return self

    def start(self, run: Run, reference: Reference | None) -> None:
        self.recorder.begin_run(run, len(self.examples.train))
        super().start(recorded_run(run, self.recorder), reference)

    def begin(self, step: int) -> RecordedRolloutStep:
        begun = RecordedRolloutStep(self, step)
        self.recorder.dealt(begun)
        return begun

    def news(self, step: int) -> RolloutFacts | None:  # noqa: ARG002
        return None


class RecordedRolloutStep(RolloutStep):
    task: RecordedRolloutTask

    def load(self, indices: Sequence[int]) -> HeldSamples:
        recorder = self.task.recorder
        recorder.begin([self.weighed.samples[index] for index in indices])
        held = super().load(indices)
        recorder.sharded(held.shard)
        return held


def policy_loss_of(cfg: Config) -> PolicyLoss:
    """Build the loss as the product does, for the reference."""
    assert isinstance(cfg.loss, PolicyLossConfig)
    return build_policy_loss(cfg.loss, cfg.rollout.importance_cap)


def recorded_rollouts(
    recorder: SampleRecorder, held_out: int, cfg: Config, tokenizer: Any, world: World, bridge: Bridge | None
) -> RecordedRolloutTask:
    """Make the task that draws, recorded."""
    examples = read_examples(cfg, tokenizer, world)
    examples = replace(examples, held_out=examples.held_out[:held_out])
    parts = Parts(rollouts=partial(RecordedRollouts.by, recorder))
    task = RecordedRolloutTask(cfg, examples, bridge, parts)
    return task.watched_by(recorder, policy_loss_of(cfg))
