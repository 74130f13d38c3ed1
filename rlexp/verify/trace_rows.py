"""Record training on answers that the rows give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.algos.base import Loss, Sides, Values
from rlexp.training.algos.base import Losses as LossesOf
from rlexp.training.algos.build import build_loss
from rlexp.training.train.rows_task import RowsMicroBatch, RowsStep, Use
from rlexp.training.types import Example
from rlexp.verify.recorder import Recorder, array
from rlexp.verify.records import Applied, Array, Counts, Losses, Micro, TokenAnswer, TokenExample, TokenPair


class RowsRecorder(Recorder):
    """Knows what each pass over a micro-batch is for."""

    looked_on: RowsStep

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.collected: list[Micro] = []  # of the pass that collects values for a loss of the whole batch
        self.values: Values | None = None  # that the current micro-batch's loss was computed from

    def begin(self, step: RowsStep, batch: RowsMicroBatch) -> Micro:
        held = Micro(tuple(each.index for each in batch.examples))
        training = batch.use is Use.training and not step.held_out
        if training and self.collected:  # the reference has computed already
            held.reference_n = self.collected.pop(0).reference_n
        if step.held_out:
            own = self.trace.held_out, self.trace.held_tokens
            others = self.trace.held_others, self.trace.held_other_tokens
        else:
            trained: list[Micro] = [] if self.step.trained else self.step.micros
            own = (trained if batch.use is Use.training else self.collected), self.trace.tokens
            others = self.step.others, self.step.other_tokens
        micros, seen_tokens = others if batch.use is Use.mismatched else own
        if batch.use is not Use.searching:
            micros.append(held)
            seen_tokens.update({each.index: tokens_of(each, step.task.sides) for each in batch.examples})
        return held

    def judged(self, batch: Any, given: Values, made: LossesOf, slopes: Sides | None = None) -> None:  # noqa: ARG002
        """Record what the loss was given of a micro-batch, and what it has made of it."""
        micro, self.values = self.micro, given
        micro.sums, micro.counts, micro.mismatched = named_sums(given), counts_of(given), _array(given.mismatched_B)
        micro.losses = copied(made, slopes_of(made.losses_E.sum(), given) if slopes is None else slopes, given)

    def applied(self, values: Values, losses: LossesOf, *, whole_batch: bool) -> None:
        """Record a call of the formula: what it was given, and what it has made of it."""
        if self.looked_on.held_out or not torch.is_grad_enabled():
            return  # nothing is trained on it
        found = copied(losses, slopes_of(losses.losses_E.sum(), values), values)
        (self.step if whole_batch else self.micro).applied = Applied(
            named_sums(values), counts_of(values), _array(values.mismatched_B), found
        )

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:
        if self.values is not None:
            slopes, self.values = slopes_of(loss, self.values), None
            self.micro.handed_slopes = {side: array(slope) for side, slope in slopes.items()}
        super().handed(batch, loss, last)

    def log(self, row: MetricRow) -> None:
        super().log(row)
        self.collected = []


def loss_of(cfg: Config) -> Loss:
    """Build the loss as the product does, for the reference."""
    return build_loss(cfg.loss)


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


class RecordedLoss:
    """Records each call of the loss's formula."""

    def __init__(self, loss: Loss, recorder: RowsRecorder) -> None:
        self._loss, self._recorder = loss, recorder
        self.wanted = loss.wanted

    def __call__(self, values: Values) -> LossesOf:
        losses = self._loss(values)
        self._recorder.applied(values, losses, whole_batch=self.wanted.whole_batch)
        return losses


def tokens_of(example: Example, sides: Sequence[str]) -> TokenExample:
    """Copy an example's tokens, for the comparison."""
    answers: dict[str, Any] = {}
    for side, (answer, mask) in zip(sides, example.masked, strict=True):
        answers |= {side: answer, f"{side}_mask": mask}
    if len(sides) == 1:
        return TokenAnswer(prompt=example.prompt, origin=example.origin, label=example.label, **answers)
    return TokenPair(prompt=example.prompt, origin=example.origin, margin=example.margin, **answers)
