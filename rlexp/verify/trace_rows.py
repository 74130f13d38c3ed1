"""Record training on answers that the rows give: the product's own task, with its loss and reference behind proxies.

`OfflineTask` names its passes, and gives `note` the derivatives of a whole batch's loss, for this alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.training.algos.base import Loss, Sides, Values
from rlexp.training.algos.base import Losses as LossesOf
from rlexp.training.metrics.meter import Meter
from rlexp.training.reference.base import Reference
from rlexp.training.train.choose_task import task_class
from rlexp.training.train.examples import read_examples
from rlexp.training.train.offline_task import HeldExamples, OfflineStep, OfflineTask
from rlexp.training.train.parts import Run
from rlexp.training.types import Answered, Pack, SequenceName, Shard
from rlexp.training.world.groups import World
from rlexp.verify.recorder import Recorder, array, recorded_run
from rlexp.verify.records import Applied, Array, Counts, Losses, Micro, TokenAnswer, TokenExample, TokenPair

TRAINING = "training"


class RowsRecorder(Recorder):
    """Knows what each pass over a micro-batch is for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pass_ = TRAINING
        self.collected: list[Micro] = []  # of the pass that collects values for a loss of the whole batch
        self.values: Values | None = None  # that the current micro-batch's loss was computed from

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """Say what a pass is for, other than training."""
        if name == "collecting":
            self.collected = []
        self.pass_, before = (name if self.pass_ == TRAINING else f"{name}, {self.pass_}"), self.pass_
        try:
            yield
        finally:
            self.pass_ = before

    def begin(self, examples: Sequence[Answered], sides: Sequence[str]) -> None:
        training = self.pass_ == TRAINING
        self.held = Micro(tuple(each.index for each in examples))
        if training and self.collected:  # the reference has computed already
            self.held.reference_n = self.collected.pop(0).reference_n
        places, seen_tokens = {
            TRAINING: ([] if self.step.trained else self.step.micros, self.trace.tokens),
            "collecting": (self.collected, self.trace.tokens),
            "mismatched": (self.step.others, self.step.other_tokens),
            "held out": (self.trace.held_out, self.trace.held_tokens),
            "collecting, held out": (self.trace.held_out, self.trace.held_tokens),
            "mismatched, held out": (self.trace.held_others, self.trace.held_other_tokens),
        }[self.pass_]
        places.append(self.held)
        seen_tokens.update({each.index: tokens_of(each, sides) for each in examples})

    def judged(self, values: Values, losses: LossesOf, slopes: Sides | None) -> None:
        """Record what the loss was given of a micro-batch, and what it has made of it."""
        if self.pass_ != TRAINING:
            return
        micro, self.values = self.micro, values
        micro.sums, micro.counts, micro.mismatched = named_sums(values), counts_of(values), _array(values.mismatched_B)
        micro.losses = copied(losses, slopes_of(losses.losses_E.sum(), values) if slopes is None else slopes, values)

    def applied(self, values: Values, losses: LossesOf, *, whole_batch: bool) -> None:
        """Record a call of the formula: what it was given, and what it has made of it."""
        if self.pass_ not in (TRAINING, "collecting") or not torch.is_grad_enabled():
            return  # nothing is trained on it
        found = copied(losses, slopes_of(losses.losses_E.sum(), values), values)
        (self.step if whole_batch else self.micro).applied = Applied(
            named_sums(values), counts_of(values), _array(values.mismatched_B), found
        )

    def handing(self, loss: Tensor) -> None:
        if self.values is not None:
            slopes, self.values = slopes_of(loss, self.values), None
            self.micro.handed_slopes = {side: array(slope) for side, slope in slopes.items()}


class Recorded(OfflineTask):
    """The product's task, with wrapped parts. Only the first `held_out` held-out examples are evaluated."""

    recorder: RowsRecorder

    def watched_by(self, recorder: RowsRecorder, held_out: int) -> Recorded:
        self.recorder = recorder
        self.held_out = self.held_out[:held_out]
        self.loss = RecordedLoss(self.loss, recorder)
        return self

    def start(self, run: Run, reference: Reference | None) -> None:
        self.recorder.begin_run(run, len(self.train))

        recorded = None if reference is None else RecordedReference(reference, self.recorder)
        super().start(recorded_run(run, self.recorder), recorded)

    def begin(self, step: int) -> OfflineStep:
        begun = super().begin(step)
        self.recorder.dealt(begun)
        return begun

    def passing(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.recorder.passing(what)

    def evaluate(self, step: int) -> dict[str, float]:
        with self.recorder.passing("held out"):
            return super().evaluate(step)

    def shard(self, examples: Sequence[Answered], names: Sequence[SequenceName] = ()) -> HeldExamples:
        self.recorder.begin(examples, self.sides)
        held = super().shard(examples, names)
        self.recorder.sharded(held.shard)
        return held

    def note(self, meter: Meter, values: Values, losses: LossesOf, slopes: Sides | None) -> None:
        self.recorder.judged(values, losses, slopes)
        super().note(meter, values, losses, slopes)


def loss_of(cfg: Config) -> Loss:
    """Build the loss as the product does, for the reference."""
    task = task_class(cfg.loss)
    assert issubclass(task, OfflineTask)
    return task.loss_of(cfg)


def recorded_task(recorder: RowsRecorder, held_out: int, cfg: Config, tokenizer: Any, world: World, _: Any) -> Recorded:
    """Make the task that the loss has, recorded."""
    task = task_class(cfg.loss)
    assert issubclass(task, OfflineTask)
    made = type(f"Recorded{task.__name__}", (Recorded, task), {})
    watched: Recorded = made(cfg, read_examples(cfg, tokenizer, world)).watched_by(recorder, held_out)
    watched.most_steps = cfg.train.stop_after  # nothing is asked of a reference beyond them
    return watched


def slopes_of(total: Tensor, values: Values) -> Sides:
    """Return the derivatives of a total by what the model says of each answer."""
    found = torch.autograd.grad(total, list(values.judged.values()), retain_graph=True, allow_unused=True)
    return {side: torch.zeros_like(each) if slope is None else slope
            for (side, each), slope in zip(values.judged.items(), found, strict=True)}  # fmt: skip


def copied(losses: LossesOf, slopes: Sides, values: Values) -> Losses:
    return Losses(
        array(losses.losses_E),
        {side: array(slope) for side, slope in slopes.items()},
        {name: array(value_E) for name, value_E in losses.metrics_E.items()},
        {name: array(weight_E) for name, weight_E in losses.weights_E.items()},
        values.carried,
    )


def counts_of(values: Values) -> Counts:
    tokens = {side: array(each) for side, each in values.tokens.items()}
    return Counts(tokens, values.mean_tokens, _array(values.margin_E), _array(values.label_E))


def _array(values: Tensor | None) -> Array | None:
    return None if values is None else array(values)


def named_sums(values: Values) -> dict[str, Array]:
    given = {"policy": values.judged, "reference": values.reference, **values.of_tokens}
    return {f"{who}/{side}": array(each) for who, sides in given.items() for side, each in (sides or {}).items()}


class RecordedReference(Reference):
    """The product's reference, whose answers are recorded."""

    def __init__(self, reference: Reference, recorder: RowsRecorder) -> None:
        self.reference, self.recorder = reference, recorder

    def known(self, pack: Pack, shard: Shard) -> Shard:
        return self.reference.known(pack, shard)

    def logps(self, shard: Shard) -> Tensor:
        logps_n = self.reference.logps(shard)
        self.recorder.of(shard).reference_n = array(logps_n)
        return logps_n


class RecordedLoss:
    """Records each call of the loss's formula."""

    def __init__(self, loss: Loss, recorder: RowsRecorder) -> None:
        self._loss, self._recorder = loss, recorder
        self.wanted = loss.wanted

    def __call__(self, values: Values) -> LossesOf:
        losses = self._loss(values)
        self._recorder.applied(values, losses, whole_batch=self.wanted.whole_batch)
        return losses


def tokens_of(example: Answered, sides: Sequence[str]) -> TokenExample:
    """Copy an example's tokens, for the comparison."""
    answers: dict[str, Any] = {}
    for side, (answer, mask) in zip(sides, example.answers, strict=True):
        answers |= {side: answer, f"{side}_mask": mask}
    if len(sides) == 1:
        return TokenAnswer(prompt=example.prompt, origin=example.origin, label=example.label, **answers)
    return TokenPair(prompt=example.prompt, origin=example.origin, margin=example.margin, **answers)
