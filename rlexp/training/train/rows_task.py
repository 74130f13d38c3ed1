"""Train on answers that the rows give: pairs, labelled or plain answers. What a loss wants decides what a step does.

A loss that wants the whole train batch (a sort, a mean over all answers) sees the values of all its examples at once. A
pass without gradient collects them first, and autograd gives the derivative of the loss by each value; the pass with
gradient sends these derivatives backward. With one micro-batch a replica, the pass with gradient is enough.

Shape letters: E examples, S sequences (the answers of an example stand next to each other), B examples of the train
batch, n trained tokens of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import DataError
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import EXAMPLE, SIDES
from rlexp.training.algos.base import Losses, Sides, Values
from rlexp.training.algos.build import build_loss
from rlexp.training.algos.log_ratios import log_ratio
from rlexp.training.dataset.sampler import Batch
from rlexp.training.dealer.deal import Dealt, TooLargeError, unit_of
from rlexp.training.dealer.of_run import shared_in_words, too_large, without_room
from rlexp.training.dealer.packing import cuts_in_words, listed, pack_examples
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.train.by_length import Buckets
from rlexp.training.train.examples import Examples, sampler_of
from rlexp.training.train.fitting import unfit
from rlexp.training.train.sequence_sums import scores_by_sequence, sum_by_sequence, with_ends
from rlexp.training.train.step import note_tokens
from rlexp.training.train.task import NOTHING, MicroBatch, Step, Task, Watch
from rlexp.training.train.whole_batch import WholeBatch, gathered, mismatched, with_slopes
from rlexp.training.types import Example, Floats, SequenceName, moved
from rlexp.training.world.objects import gather_objects


class RowsTask(Task):
    if_not_finite = " A smaller optim.lr?"
    carried: Mapping[str, float]  # what the loss left behind at the last step
    most_steps: int | None = None  # of the run's steps, those for which a stored reference must know the examples

    def __init__(self, cfg: Config, examples: Examples) -> None:
        self.kind, self.sides = EXAMPLE[cfg.loss.rows], SIDES[cfg.loss.rows]
        self.loss = build_loss(cfg.loss)
        self.wanted = self.wanted_of_evaluation = self.loss.wanted
        self.examples = examples
        self.sampler = sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.carried = {}
        self.buckets = Buckets(cfg.eval.buckets)
        reasons = (unfit(cfg, examples), without_room(cfg, examples.train, examples.held_out))
        if (reason := next(filter(None, reasons), None)) is not None:
            raise DataError(reason)

    def batch(self, step: int) -> Batch:
        return self.sampler.batch(step)

    def begin(self, step: int, watch: Watch = NOTHING) -> RowsStep:
        batch = self.batch(step)
        return RowsStep(self, batch, [self.examples.train[index] for index in batch.indices], watch)

    @torch.no_grad()
    def evaluated(self, watch: Watch) -> dict[str, float]:
        """Run the held-out examples once, by the code of training, as one batch."""
        meter, held_out = Meter(self.run.world, self.run.device), self.examples.held_out
        with self.run.phases("eval"):
            whole = Batch(0, 0, tuple(range(len(held_out))))
            RowsStep(self, whole, held_out, watch, held_out=True).evaluate(meter)
        return self.buckets.completed(meter.reduce())

    def sharing(self) -> str | None:
        units = [unit_of(self.examples.train[index]) for index in self.batch(1).indices]
        return shared_in_words(self.run.dealer, units)

    def cuts(self) -> str | None:
        run, examples = self.run, [self.examples.train[index] for index in self.batch(1).indices]
        dealt = run.dealer.deal([unit_of(example) for example in examples])
        packs = (
            pack_examples([examples[place] for place in places], **run.padding, forest=forest)
            for places, forest in zip(chain.from_iterable(dealt.packs), chain.from_iterable(dealt.forests), strict=True)
        )
        return cuts_in_words(packs, run.layout, run.world.ring.size)

    @functools.cached_property
    def held_out_dealt(self) -> Dealt:
        """The held-out examples, which are the same at each evaluation."""
        held_out = self.examples.held_out
        return self.run.dealer.deal_all(len(held_out), lambda place: unit_of(held_out[place]))

    def position(self) -> dict[str, Any] | None:
        return {"carried": dict(self.carried)} if self.carried else None

    def restore(self, folder: Path, position: Any, step: int) -> None:  # noqa: ARG002
        self.carried = position.get("carried", {}) if position else {}

    def by_side(self, values_S: Tensor) -> Sides:
        return {side: values_S[place :: len(self.sides)] for place, side in enumerate(self.sides)}


class Use(Enum):
    """What a micro-batch is computed for."""

    training = "training"
    collecting = "collecting"  # the values of a whole train batch
    mismatched = "mismatched"  # log-ratios of answers to other prompts
    searching = "searching"  # an example whose loss is not finite


@dataclass(frozen=True)
class RowsMicroBatch(MicroBatch):
    """The examples of a micro-batch, and what is known of them beside the models' answers."""

    examples: tuple[Example, ...]
    places: tuple[int, ...]  # of the examples in their batch
    use: Use
    number: int | None  # of those of the step; None for any other
    tokens: Sides  # trained tokens of each answer
    margin_E: Tensor | None
    label_E: Tensor | None
    tail_n: Tensor | None  # the weight of each token's log-probability


@dataclass(frozen=True)
class Prepared:
    """What passes without gradient found before the first micro-batch."""

    reference: Mapping[int, Sides | None] = field(default_factory=dict)  # its sums, by the number of a micro-batch
    whole: WholeBatch | None = None
    mismatched_B: Tensor | None = None


class RowsStep(Step):
    """One train batch; or, with `held_out`, all held-out examples. `micro_batches` holds places in the batch."""

    prepared: Prepared = Prepared()

    def __init__(
        self, task: RowsTask, batch: Batch, examples: Sequence[Example], watch: Watch = NOTHING, *,
        held_out: bool = False,
    ) -> None:  # fmt: skip
        self.task, self.batch, self.examples = task, batch, examples
        self.watch, self.held_out = watch, held_out
        self.count = len(examples)  # the loss's denominator, known before the first micro-batch
        self.mean_tokens = mean_tokens(examples) if task.wanted.mean_tokens else 1.0
        self.carried: Mapping[str, float] = task.carried
        self.take(task.held_out_dealt if held_out else self.deal(examples.__getitem__), task.run.world.replica)

    def deal(self, example: Callable[[int], Example]) -> Dealt:
        """Deal one example for each place of the batch."""
        dealer = self.task.run.dealer
        try:
            if self.held_out:
                return dealer.deal_all(self.count, lambda place: unit_of(example(place)))
            return dealer.deal([unit_of(example(place)) for place in range(self.count)])
        except TooLargeError as error:  # one that is made of several examples
            raise DataError(too_large(error, self.task.run.cfg, example(error.place).origin)) from None

    # ---- before the first micro-batch ----

    def prepare(self) -> Prepared:
        wanted = self.task.wanted
        prepared = Prepared(mismatched_B=self.log_ratios_of_others() if wanted.mismatched else None)
        collects = wanted.whole_batch and len(self.micro_batches) > 1 and not self.held_out
        return self.collected(prepared) if collects else prepared

    @torch.no_grad()
    def collected(self, prepared: Prepared) -> Prepared:
        """Run all micro-batches without gradient, and evaluate the loss on the values of the whole batch.

        Of each micro-batch a few numbers are kept, and not its tokens.
        """
        parts: list[tuple[Sequence[int], Values]] = []
        with self.task.run.phases("collect"):
            for number, places in enumerate(self.micro_batches):
                values, _ = self.values(self.packed(places, Use.collecting, number), prepared)
                parts.append((places, values))
            whole = self.whole_batch(parts)
        reference = {number: values.reference for number, (_, values) in enumerate(parts)}
        return replace(prepared, reference=reference, whole=whole)

    def whole_batch(self, parts: Sequence[tuple[Sequence[int], Values]]) -> WholeBatch:
        """Share the values of all replicas, and evaluate the loss on them. A collective call."""
        values = gathered(parts, self.count, self.task.run.world)
        whole = WholeBatch.of(self.task.loss, values, self.task.run.device)
        self.carried = whole.losses.carried
        return whole

    @torch.no_grad()
    def log_ratios_of_others(self) -> Tensor:
        """Return the log-ratio of an answer to each prompt that is another's, (B,). A collective call."""
        run, parts = self.task.run, []
        others = mismatched(self.examples, run.cfg.data.max_length, run.tokenizer.bos_token_id)
        with run.phases("collect"):
            for places in self.deal(others).packs[run.world.replica]:
                values, _ = self.values(self.packed(places, Use.mismatched, others=others), Prepared())
                parts.append((places, values))
            return log_ratio(gathered(parts, self.count, run.world), "answer")

    # ---- a micro-batch ----

    def load(self, number: int) -> RowsMicroBatch:
        with self.task.run.phases("data"):
            return self.packed(self.micro_batches[number], Use.training, number)

    def packed(
        self, places: Sequence[int], use: Use, number: int | None = None, *,
        others: Callable[[int], Example] | None = None,
    ) -> RowsMicroBatch:  # fmt: skip
        """Return this rank's part of some examples, on its way to the device, with what is known of them.

        `others` stand in the places of the batch's own examples, and have no name.
        """
        run, wanted, sides = self.task.run, self.task.wanted, self.task.sides
        examples = tuple(map(others or self.examples.__getitem__, places))
        names = [SequenceName(self.held_out, self.batch.indices[place], answer)
                 for place in places for answer in range(len(sides))] if others is None else []  # fmt: skip
        forest = None if number is None or not self.forests else self.forests[number]
        pack = replace(pack_examples(examples, **run.padding, forest=forest), names=tuple(names))
        shard = run.shard(pack)
        if wanted.scores:
            shard = with_ends(shard, pack)
        if self.task.reference is not None:
            shard = self.task.reference.known(pack, shard)
        tail_n = None
        if wanted.tail_weight < 1:
            weights = [part for each in examples for part in tail_weights(each, wanted.tail_weight)]
            tail_n = moved(listed(weights, torch.float64)[shard.listed_n], run.device)
        counts = np.array([[trained_tokens(*answer) for answer in each.masked] for each in examples])
        tokens_ES = moved(torch.from_numpy(counts.reshape(len(examples), len(sides))).double(), run.device)
        margin_E = self.column([each.margin or 0.0 for each in examples]) if wanted.margins else None
        label_E = self.column([each.label for each in examples]) if wanted.labels else None
        batch = RowsMicroBatch(shard.to(run.device), examples, tuple(places), use, number,
                               self.task.by_side(tokens_ES.flatten()), margin_E, label_E, tail_n)  # fmt: skip
        self.watch.loaded(self, batch, pack)
        return batch

    def column(self, values: Sequence[Any]) -> Tensor:
        return moved(torch.tensor(values, dtype=torch.float64), self.task.run.device)

    def sums(self, values_n: Tensor, batch: RowsMicroBatch, *, weighted: bool = True) -> Sides:
        """Add up the values of each answer's trained tokens over the ring."""
        if weighted and batch.tail_n is not None:
            values_n = values_n * batch.tail_n
        return self.task.by_side(ring_sum(sum_by_sequence(values_n, batch.shard), batch.shard.ring))

    def reference_sums(self, batch: RowsMicroBatch) -> Sides | None:
        if self.task.reference is None:
            return None
        with self.task.run.phases("reference"):
            logps_n = self.task.reference.logps(batch.shard)
        self.watch.compared(batch, logps_n)
        return self.sums(logps_n, batch)

    def values(self, batch: RowsMicroBatch, prepared: Prepared) -> tuple[Values, Any]:
        """Run the models on a micro-batch: the reference too, unless its sums are known already."""
        task, known = self.task, None if batch.number is None else prepared.reference.get(batch.number)
        reference = self.reference_sums(batch) if known is None else known  # first, while no activations are held
        with task.run.phases("forward"):
            outputs: Any = task.run.engine.forward(batch.shard)
        self.watch.returned(batch, outputs)
        values = Values(
            logps={},
            reference=reference,
            tokens=batch.tokens,
            margin_E=batch.margin_E,
            label_E=batch.label_E,
            mean_tokens=self.mean_tokens,
            mismatched_B=prepared.mismatched_B,
            carried=task.carried,
            held_out=self.held_out,
        )
        if task.wanted.scores:
            scores_S = ring_sum(scores_by_sequence(outputs.scores_n, batch.shard), batch.shard.ring)
            return replace(values, scores=task.by_side(scores_S)), outputs
        of_tokens = {name: self.sums(each_n, batch, weighted=False) for name, each_n in outputs.of_tokens.items()}
        return replace(values, logps=self.sums(outputs.logps_n, batch), of_tokens=of_tokens), outputs

    def judged(
        self, values: Values, places: Sequence[int], prepared: Prepared, meter: Meter
    ) -> tuple[Tensor, Losses, Sides | None]:
        """Return the sum of the examples' losses, with the gradient that the train batch's loss has by their values;
        then the losses, and the derivatives of a whole batch's loss."""
        slopes = None
        if self.task.wanted.whole_batch:
            losses, slopes = (prepared.whole or self.whole_batch([(places, values)])).of_places(places)
            total = with_slopes(losses, slopes, values)
        else:
            losses = self.task.loss(values)
            total = losses.losses_E.sum()
        note(meter, values, losses)
        if self.held_out:
            self.task.buckets.note(meter, [self.examples[place] for place in places], losses)
        return total, losses, slopes

    def loss(self, batch: RowsMicroBatch, meter: Meter) -> Tensor:
        values, outputs = self.values(batch, self.prepared)
        replica_loss_sum, losses, slopes = self.judged(values, batch.places, self.prepared, meter)
        self.watch.judged(batch, values, losses, slopes)
        self.note_logits(meter, outputs, batch)
        if not batch.places:  # a rank without a sample still runs its (empty) graph, so no collective waits for it
            replica_loss_sum = replica_loss_sum + 0.0 * outputs[0].sum()
        return replica_loss_sum * (self.task.run.world.size / self.count)

    def note_logits(self, meter: Meter, outputs: Any, batch: RowsMicroBatch) -> None:
        """Meter what the model says of the answers' tokens beside what the loss is given: the mean logits."""
        if self.task.wanted.scores:
            return
        logits = self.task.by_side(sum_by_sequence(outputs.mean_logits_n, batch.shard))
        trained = self.task.by_side(sum_by_sequence(torch.ones_like(outputs.mean_logits_n), batch.shard))
        for side in self.task.sides:
            meter.add_mean(f"logits/{side}", logits[side].sum(), trained[side].sum(), SHARDED)

    # ---- evaluation, and the end of a step ----

    def evaluate(self, meter: Meter) -> None:
        prepared, parts = self.prepare(), []
        for number in range(len(self.micro_batches)):
            batch = self.load(number)
            values, outputs = self.values(batch, prepared)
            if self.task.wanted.whole_batch:
                parts.append((batch.places, values))
            else:
                self.judged(values, batch.places, prepared, meter)
            self.note_logits(meter, outputs, batch)
            note_tokens(meter, batch.shard)
        if self.task.wanted.whole_batch:
            prepared = replace(prepared, whole=self.whole_batch(parts))
        for places, values in parts:
            self.judged(values, places, prepared, meter)

    def finish(self, values: dict[str, float]) -> None:  # noqa: ARG002
        self.task.carried = self.carried

    def samples(self) -> list[str]:
        return [example.origin for example in self.examples]

    @torch.no_grad()
    def samples_without_finite_loss(self) -> list[str]:
        """Run each example of this replica alone and look; then tell the other replicas.

        Of a loss that wants the whole batch, the values that it is given are looked at.
        """
        run, loss, local = self.task.run, self.task.loss, []
        prepared = Prepared(mismatched_B=self.prepared.mismatched_B)
        for pack, places in enumerate(self.micro_batches):
            for number in range(self.dealt.most_units(pack)):  # equally many passes on every replica
                values, _ = self.values(self.packed(places[number : number + 1], Use.searching), prepared)
                sums = [*values.judged.values(), *(values.reference or {}).values()]
                if not self.task.wanted.whole_batch:
                    sums.append(loss(values).losses_E)
                if not all(bool(each.isfinite().all()) for each in sums):
                    local.append(places[number])
        everywhere = {place for each in gather_objects(local, run.world.size) for place in each}
        return [self.examples[place].origin for place in sorted(everywhere)]


def note(meter: Meter, values: Values, losses: Losses) -> None:
    """Meter the losses of a micro-batch's examples, and what belongs to them."""
    values_E = {"loss": losses.losses_E, **losses.metrics_E}
    values_E |= {f"logps/{side}": logps_E for side, logps_E in values.logps.items()}
    for name, value_E in values_E.items():
        weight_E = None if name == "loss" else losses.weights_E.get(name)
        if weight_E is None:
            meter.add_mean(name, value_E.sum(), len(value_E), REPLICATED)
        else:
            meter.add_mean(name, (weight_E * value_E).sum(), weight_E.sum(), REPLICATED)
    for name, (one, other) in losses.differences.items():
        meter.add_difference(name, one, other)


def mean_tokens(examples: Sequence[Example]) -> float:
    """Return the mean number of trained tokens of the examples' first answers."""
    return sum(trained_tokens(*example.masked[0]) for example in examples) / len(examples)


def trained_tokens(answer: Any, mask: Any) -> int:
    return len(answer) if mask is None else int(np.count_nonzero(mask))


def tail_weights(example: Example, weight: float) -> list[Floats]:
    """Return the weight of each trained token of an example's answers: less beyond the length of the shortest."""
    lengths = [trained_tokens(*answer) for answer in example.masked]
    return [np.where(np.arange(length) < min(lengths), 1.0, weight) for length in lengths]
