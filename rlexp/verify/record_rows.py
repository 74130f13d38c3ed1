"""Record training on answers that the rows give.

Shape letters: E examples, B examples of the train batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.training.algos.base import Loss, Losses, Sides, Values
from rlexp.training.train.rows_task import RowsStep, Use
from rlexp.training.train.task import Task
from rlexp.verify.recorder import LEFT_OUT, OTHERS, Recorder, array, tokens_of
from rlexp.verify.recording import Key


class RowsRecorder(Recorder):
    """Knows what each pass over a micro-batch is for, and what the loss is given."""

    looked_on: RowsStep
    values: Values | None = None  # that the current micro-batch's loss was computed from

    def begin_run(self, task: Task) -> None:
        super().begin_run(task)
        rows: Any = task
        rows.loss = RecordedLoss(rows.loss, self)

    def held(self, step: Any, batch: Any) -> tuple[list[Key], list[int], str]:
        keys: list[Key] = [(each.index, side) for each in batch.examples for side in self.sides]
        prompts = [len(each.prompt) for each in batch.examples for _ in self.sides]
        if step.held_out or batch.use is Use.searching or self.scene.row:
            return keys, prompts, LEFT_OUT
        examples = {each.index: tokens_of(each, self.sides) for each in batch.examples}
        if batch.use is Use.mismatched:
            for sample, example in examples.items():
                self.scene.put("answers to other prompts", (sample,), example.sequence(self.sides[0]))
            return keys, prompts, OTHERS
        self.recording.examples |= examples
        if batch.use is Use.collecting:
            return keys, prompts, LEFT_OUT
        return keys, prompts, ""

    def compared(self, batch: Any, logps_n: Tensor) -> None:
        held = self.of_shard[id(batch.shard)]
        collecting = batch.use is Use.collecting and not self.looked_on.held_out
        self.put("reference", replace(held, more="") if collecting else held, logps_n)

    def judged(self, batch: Any, given: Values, made: Losses, slopes: Sides | None = None) -> None:
        """Record what the loss was given of a micro-batch, and what the step has made of it."""
        self.values = given
        slopes = slopes_of(made.losses_E.sum(), given) if slopes is None else slopes
        samples = [each.index for each in batch.examples]
        self.of_call("", given, made, slopes, samples)
        self.handing = samples, made, slopes

    def applied(self, values: Values, losses: Losses, *, whole_batch: bool) -> None:
        """Record a call of the formula: what it was given, and what it has made of it."""
        if self.looked_on.held_out or not torch.is_grad_enabled() or self.scene.row:
            return  # nothing is trained on it
        step = self.looked_on
        samples = [*step.batch.indices] if whole_batch else [key[0] for key in self.now.keys[:: len(self.sides)]]
        if len(samples) == len(losses.losses_E):
            self.of_call("formula: ", values, losses, slopes_of(losses.losses_E.sum(), values), samples)

    def of_call(self, prefix: str, given: Values, made: Losses, slopes: Sides, samples: Sequence[int]) -> None:
        scene, examples = self.scene, [(sample,) for sample in samples]
        whose = {"policy": given.judged, "reference": given.reference, **given.of_tokens}
        for side in self.sides:
            keys = [(sample, side) for sample in samples]
            for who, sides in whose.items():
                scene.put_all(f"{prefix}sum of {who}", keys, array(sides[side]) if sides else None)
            scene.put_all(f"{prefix}number of trained tokens", keys, array(given.tokens[side]))
            scene.put_all(f"{prefix}slope", keys, array(slopes[side]))
        for name, each in (("margin", given.margin_E), ("label", given.label_E), ("loss", made.losses_E)):
            scene.put_all(f"{prefix}{name}", examples, None if each is None else array(each))
        for name, each in made.metrics_E.items():
            scene.put_all(f"{prefix}logged {name}", examples, array(each))
        for name, each in made.weights_E.items():
            scene.put_all(f"{prefix}weight of {name}", examples, array(each))
        if given.mismatched_B is not None:
            everyone = [(sample,) for sample in self.looked_on.batch.indices]
            scene.put_all(f"{prefix}log-ratio of a mismatched answer", everyone, array(given.mismatched_B))
        if not samples:
            return
        scene.put(f"{prefix}mean of the trained tokens", ("it",), given.mean_tokens)
        for name, value in given.carried.items():
            scene.put(f"{prefix}carried", (name,), value)

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:
        super().handed(batch, loss, last)
        samples, made, slopes = self.handing
        share = self.world.size / self.looked_on.count
        where = self.micro_batches
        self.scene.expect("loss handed to the engine", (f"micro-batch {where}",), float(loss.detach()),
                          float(made.losses_E.detach().sum()) * share)  # fmt: skip
        if self.values is not None:
            handed, self.values = slopes_of(loss, self.values), None
            for side, slope_E in slopes.items():
                for sample, got, meant in zip(samples, array(handed[side]), array(slope_E) * share, strict=True):
                    self.scene.expect("derivative of the loss handed to the engine", (sample, side), got, meant)


def slopes_of(total: Tensor, values: Values) -> Sides:
    """Return the derivatives of a total by what the model says of each answer."""
    made = torch.autograd.grad(total, list(values.judged.values()), retain_graph=True, allow_unused=True)
    return {side: torch.zeros_like(each) if slope is None else slope
            for (side, each), slope in zip(values.judged.items(), made, strict=True)}  # fmt: skip


class RecordedLoss:
    """Records each call of the loss's formula."""

    def __init__(self, loss: Loss, recorder: RowsRecorder) -> None:
        self._loss, self._recorder = loss, recorder
        self.wanted = loss.wanted

    def __call__(self, values: Values) -> Losses:
        losses = self._loss(values)
        self._recorder.applied(values, losses, whole_batch=self.wanted.whole_batch)
        return losses
