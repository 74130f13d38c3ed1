"""Record training on samples that the policy draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.training.algos.build import build_policy_loss
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTerms, PolicyTokens
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.rollout_task import RolloutStep, SamplesMicroBatch
from rlexp.training.types import ScoredSample
from rlexp.verify.recorder import Recorder, array
from rlexp.verify.records import Array, Drawn, Micro, RolloutSeen, Terms, TokenAnswer

SAID = {"policy": "logps_n", "entropies": "entropy_n", "values": "values_n"}
KNOWN = ("old_n", "behaviour_n", "reference_n", "advantages_n", "old_values_n", "returns_n", "weight_n", "trained_n")


class SampleRecorder(Recorder):
    """Knows which rollout is drawn, and what its samples are worth."""

    looked_on: RolloutStep
    configured: PolicyLoss  # the loss that the configuration names, apart from the task's

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outcomes: dict[str, Array] = {}
        self.credit: Array | None = None

    def drawn(self, rollouts: Rollouts, step: int) -> None:
        """Record a rollout that is complete."""
        self.trace.rollouts.append(RolloutSeen(
            number=rollouts.number, step=step, kl_coef=rollouts.kl_coef,
            samples=[drawn_of(sample) for sample in rollouts.own_samples], outcomes=self.outcomes, credit=self.credit,
        ))  # fmt: skip

    def begin(self, step: RolloutStep, batch: SamplesMicroBatch) -> Micro:  # noqa: ARG002
        held = Micro(tuple(sample.place for sample in batch.samples))
        if not self.step.trained:
            self.step.micros.append(held)
        self.step.tokens.update({s.place: TokenAnswer(array_of(s.example.prompt), array_of(s.answer), s.example.origin)
                                 for s in batch.samples})  # fmt: skip
        return held

    def judged(self, batch: Any, given: PolicyTokens, made: PolicyTerms, slopes: Any = None) -> None:  # noqa: ARG002
        """Record what the loss was given of a micro-batch's tokens on this rank, and what it has made of them."""
        task = self.looked_on.task
        kl_coef = task.rollouts.kl_coef
        with torch.no_grad():
            configured = float(self.configured(given, kl_coef).loss)
        micro = self.micro
        for name in KNOWN:
            values = getattr(given, name)
            if values is not None:
                micro.known[name] = array(values)
        micro.known |= {"answer_weights": array(given.weight_S), "lengths": array(given.length_S),
                        "sums": array(given.by_sequence(given.logps_n.detach()))}  # fmt: skip
        micro.known |= {
            f"slope of {name}": array(slope) for name, slope in slopes_of(task.loss, given, kl_coef).items()
        }
        micro.terms = Terms(
            loss=float(made.loss.detach()),
            weighted={name: float(each) for name, each in made.weighted.items()},
            replicated={name: float(each) for name, each in made.replicated.items()},
            means={name: array(each) for name, each in made.means_n.items()},
            peaks={name: array(each) for name, each in made.peaks_n.items()},
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


def drawn_of(sample: ScoredSample) -> Drawn:
    return Drawn(
        place=sample.place, index=sample.example.index, prompt=array_of(sample.example.prompt),
        origin=sample.example.origin, answer=array_of(sample.answer), stopped=sample.stopped, text=sample.text,
        behaviour=sample.behaviour, terms=dict(sample.terms), score=sample.score, old=sample.old,
        reference=sample.reference, values=sample.values, counts=sample.counts,
        advantages=getattr(sample, "advantages", None), returns=getattr(sample, "returns", None),
    )  # fmt: skip


class RecordedRollouts(Rollouts):
    """The product's rollouts, recorded when they are complete."""

    recorder: SampleRecorder
    evaluates = False

    @classmethod
    def by(cls, recorder: SampleRecorder, loss: PolicyLoss, **parts: Any) -> RecordedRollouts:
        recorded: Any = RecordedCredit(loss, recorder)
        made = cls(**parts, loss=recorded)
        made.recorder = recorder
        return made

    def ensure(self, step: int) -> Made | None:
        made = super().ensure(step)
        if made is not None:
            self.recorder.drawn(self, step)
        self.recorder.step.rollout = self.number
        return made

    def _refuse(self, values: dict[str, float]) -> None:
        """Go on with samples of another model, since it is to be found out why they are."""

    def evaluate(self) -> dict[str, float]:
        self.evaluates = True
        return super().evaluate()

    def _collect(self, *args: Any) -> list[ScoredSample]:
        scored = super()._collect(*args)
        if self.evaluates:
            self.evaluates = False
            self.recorder.trace.held_rollout = [drawn_of(sample) for sample in scored]
        return scored


class RecordedCredit:
    """A policy loss, of which is recorded what each sample earns."""

    def __init__(self, loss: PolicyLoss, recorder: SampleRecorder) -> None:
        self._loss, self._recorder = loss, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def credit(self, outcomes: Outcomes, kl_coef: float) -> Tensor:
        credit_N = self._loss.credit(outcomes, kl_coef)
        self._recorder.outcomes = {"scores": array(outcomes.scores_N), "divergences": array(outcomes.kl_N),
                                   "prompts": array(outcomes.group_N)}  # fmt: skip
        self._recorder.credit = array(credit_N)
        return credit_N


def policy_loss_of(cfg: Config) -> PolicyLoss:
    """Build the loss as the product does, for the reference."""
    assert isinstance(cfg.loss, PolicyLossConfig)
    return build_policy_loss(cfg.loss, cfg.rollout.importance_cap)
