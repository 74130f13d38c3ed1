"""Record training on samples that the policy draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.training.algos.build import build_policy_loss
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss, PolicyTerms, PolicyTokens
from rlexp.training.train.rollout_supply import Made, Rollouts
from rlexp.training.train.task import Task
from rlexp.training.types import ScoredSample
from rlexp.verify.recorder import HeldBatch, Recorder, array
from rlexp.verify.recording import ANSWER, Array, DrawnSample, Key, Scene

NOW = {"policy": "logps_n", "entropies": "entropy_n", "values": "values_n"}  # what the models say now
KNOWN = ("old", "behaviour", "reference", "advantages", "old_values", "returns", "weight", "trained")


class SampleRecorder(Recorder):
    """Knows which rollout is drawn, and what its samples are worth."""

    batch = "samples of the train batch"
    configured: PolicyLoss  # the loss that the configuration names, apart from the task's
    outcomes: Mapping[str, Array]  # that the last rollout's credit was computed from, and the credit

    def begin_run(self, task: Task) -> None:
        super().begin_run(task)
        assert isinstance(self.job.cfg.loss, PolicyLossConfig)
        self.configured = build_policy_loss(self.job.cfg.loss, self.job.cfg.rollout.importance_cap)
        self.planned = lambda number: task.sampler.batch(number + 1).indices  # type: ignore[attr-defined]

    def rollouts(self, **parts: Any) -> Rollouts:
        made = RecordedRollouts(**parts | {"loss": RecordedCredit(parts["loss"], self)})
        made.recorder = self
        return made

    def drawn(self, rollouts: Rollouts, step: int) -> None:
        """Record a rollout that is complete."""
        number, scene = rollouts.number, Scene(f"rollout {rollouts.number + 1}", step)
        self.recording.rollouts[number] = [drawn_of(sample) for sample in rollouts.own_samples]
        self.recording.coefficients[number] = rollouts.kl_coef
        scene.put("prompts", ("planned",), np.array(self.planned(number)))
        put_samples(scene, self.recording.rollouts[number])
        scene.put("coefficient", ("of the divergence",), rollouts.kl_coef)
        for name, values in self.outcomes.items():
            scene.put_all(f"outcomes: {name}", [(place, ANSWER) for place in range(len(values))], values)
        self.recording.scenes.append(scene)

    def end_run(self, task: Task) -> None:
        super().end_run(task)
        if self.job.held_out:
            scene = Scene("held-out answers", self.job.cfg.train.stop_after or 0)
            put_samples(scene, self.recording.answers, "answer to a held-out prompt")
            for sample in self.recording.answers:
                scene.put("tokens of a sample", (sample.place, ANSWER), sample.example.sequence(ANSWER))
            self.recording.scenes.append(scene)

    def held(self, step: Any, batch: Any) -> tuple[list[Key], list[int], str]:  # noqa: ARG002
        keys: list[Key] = [(sample.place, ANSWER) for sample in batch.samples]
        for sample in batch.samples:
            tokens = np.concatenate((sample.example.prompt, sample.answer))
            self.scene.put("tokens of a sample", (sample.place, ANSWER), tokens)
        return keys, [len(sample.example.prompt) for sample in batch.samples], ""

    def judged(self, batch: Any, given: PolicyTokens, made: PolicyTerms, slopes: Any = None) -> None:  # noqa: ARG002
        """Record what the loss was given of a micro-batch's tokens on this rank, and what it has made of them."""
        task, held = self.looked_on.task, self.now
        kl_coef = task.rollouts.kl_coef
        for name in KNOWN:
            values = getattr(given, f"{name}_n")
            if values is not None:
                self.put(f"given: {name}", held, values)
        for name, each_S in (("weight of an answer", given.weight_S), ("length of an answer", given.length_S),
                             ("sum of policy", given.by_sequence(given.logps_n.detach()))):  # fmt: skip
            self.scene.put_all(name, held.keys, array(each_S))
        self.scene.put("coefficient", ("of the divergence in the loss",), kl_coef)
        self.of_formula(held, given, kl_coef)
        whole = sum(float(each.detach()) for each in made.replicated.values())
        heads = self.recording.rank % self.recording.ring_size == 0
        parts = {"loss": float(made.loss.detach()) - whole + heads * whole}
        parts |= {name: float(each.detach()) for name, each in made.weighted.items()}
        parts |= {name: heads * float(each.detach()) for name, each in made.replicated.items()}
        known = self.scene.values.setdefault("part of the loss", {})
        for name, part in parts.items():
            known[(name,)] = known.get((name,), 0.0) + part
        for name, each_n in {**made.means_n, **made.peaks_n}.items():
            self.put(f"logged {name}", held, each_n)
        self.meant = float(made.loss.detach()) * self.world.size

    def of_formula(self, held: HeldBatch, given: PolicyTokens, kl_coef: float) -> None:
        """Record the derivatives of the configured loss's part on this rank by what the models say of its tokens.

        The formula is applied once more: DeepSpeed would take a derivative by a model's output for a backward pass."""
        leaves = {name: values.detach().requires_grad_() for name, field in NOW.items()
                  if (values := getattr(given, field)) is not None and values.requires_grad}  # fmt: skip
        with torch.enable_grad():
            terms = self.configured(replace(given, **{NOW[name]: each for name, each in leaves.items()}), kl_coef)
            none: list[Tensor | None] = [None] * len(leaves)
            slopes = none
            if terms.loss.requires_grad:
                slopes = [*torch.autograd.grad(terms.loss, list(leaves.values()), allow_unused=True)]
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
            self.put(f"formula: slope by {name}", held, torch.zeros_like(leaf) if slope is None else slope)

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:
        super().handed(batch, loss, last)
        where = (f"micro-batch {self.micro_batches}",)
        self.scene.expect("loss handed to the engine", where, float(loss.detach()), self.meant)


def put_samples(scene: Scene, samples: list[DrawnSample], name: str = "ranks that hold a sample") -> None:
    """Put down what is known of drawn samples, and under a `name` that they are there."""
    for sample in samples:
        key = (sample.place, ANSWER)
        facts = {name: 1, "prompt of a sample": sample.index, "prompt's tokens": sample.prompt,
                 "answer": sample.answer, "text of an answer": sample.text, "end of an answer": sample.stopped,
                 "score": sample.score, "counts": sample.counts}  # fmt: skip
        facts |= {f"reward {name}": value for name, value in sample.terms.items()}
        facts |= {f"scored: {name}": getattr(sample, name)
                  for name in ("behaviour", "old", "reference", "values", "advantages", "returns")}  # fmt: skip
        for fact, value in facts.items():
            if value is not None:
                scene.put(fact, key, value)


def drawn_of(sample: ScoredSample) -> DrawnSample:
    example = sample.example
    return DrawnSample(
        place=sample.place, index=example.index, prompt=example.prompt.astype(np.int64), origin=example.origin,
        answer=sample.answer.astype(np.int64), stopped=sample.stopped, text=sample.text, behaviour=sample.behaviour,
        terms=dict(sample.terms), score=sample.score, old=sample.old, reference=sample.reference, values=sample.values,
        counts=sample.counts, advantages=getattr(sample, "advantages", None),
        returns=getattr(sample, "returns", None), asked=example.text, right=example.expected,
    )  # fmt: skip


class RecordedRollouts(Rollouts):
    """The product's rollouts, recorded when they are complete."""

    recorder: SampleRecorder
    evaluates = False

    def ensure(self, step: int) -> Made | None:
        made = super().ensure(step)
        if made is not None:
            self.recorder.drawn(self, step)
        self.recorder.scene.put("rollout", ("of the step",), self.number + 1)
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
            self.recorder.recording.answers = [drawn_of(sample) for sample in scored]
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
                                   "prompts": array(outcomes.group_N), "credit": array(credit_N)}  # fmt: skip
        return credit_N
