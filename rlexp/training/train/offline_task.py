"""Train on answers that the rows give: pairs, or any other kind of which a loss makes a value for each example.

A loss that asks for the whole train batch (a sort, a mean over all answers) sees the values of all its examples at
once. A pass without gradient collects them first, and autograd gives the derivative of the loss by each value; the pass
with gradient sends these derivatives backward. With one micro-batch a replica, the pass with gradient is enough.

Shape letters: E examples, S sequences (the answers of an example stand next to each other), n trained tokens of one
rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import DataError, NonFiniteError
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import EXAMPLE, SIDES
from rlexp.training.algos.base import Loss, Losses, Sides, Values
from rlexp.training.algos.build import build_loss
from rlexp.training.dataset.sampler import Batch, Sampler
from rlexp.training.dealer.deal import Dealt, TooLargeError, unit_of
from rlexp.training.dealer.of_run import shared_in_words, too_large, without_room
from rlexp.training.dealer.packing import listed, pack_examples
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.training.reference.base import Reference
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.train.by_length import Buckets
from rlexp.training.train.examples import Examples, longest_examples, sampler_of
from rlexp.training.train.parts import Run
from rlexp.training.train.sequence_sums import sum_by_sequence
from rlexp.training.train.step import note_tokens
from rlexp.training.train.task import Held, Step, Task
from rlexp.training.train.whole_batch import WholeBatch, gathered, with_slopes
from rlexp.training.types import Answered, Floats, Pack, SequenceName, Shard, moved
from rlexp.training.world.objects import gather_objects


class OfflineTask(Task):
    reference: Reference | None
    carried: Mapping[str, float]  # what the loss left behind at the last step
    most_steps: int | None = None  # of the run's steps, those for which a stored reference must know the examples

    def __init__(self, cfg: Config, examples: Examples) -> None:
        self.kind, self.sides = EXAMPLE[cfg.loss.rows], SIDES[cfg.loss.rows]
        self.loss = self.loss_of(cfg)
        self.wanted = self.loss.wanted
        self.examples = examples
        self.train: Sequence[Answered] = examples.train
        self.held_out: Sequence[Answered] = examples.held_out
        self.sampler: Sampler = sampler_of(cfg, cfg.loss.rows, len(self.train), examples.mixture)
        self.carried = {}
        self.buckets = Buckets(cfg.eval.buckets)
        if (said := self.unfit(cfg, examples)) is not None:
            raise DataError(said)
        for part in (self.train, self.held_out):
            if (said := without_room(cfg, part)) is not None:
                raise DataError(said)

    @classmethod
    def of(cls, cfg: Config, examples: Examples, bridge: Bridge | None = None, parts: Any = None) -> OfflineTask:  # noqa: ARG003
        return cls(cfg, examples)

    @classmethod
    def loss_of(cls, cfg: Config) -> Loss:
        """Build the loss. A task of one's own may have one that no configuration names."""
        return build_loss(cfg.loss)

    @classmethod
    def longest(cls, cfg: Config) -> Examples:
        return Examples(longest_examples(cfg), [], Counter(), Counter())

    @classmethod
    def longest_in_words(cls, cfg: Config) -> str:  # noqa: ARG003
        return "of which half is trained on, and no two share a prompt"

    @classmethod
    def unfit(cls, cfg: Config, examples: Examples) -> str | None:
        margins = examples.margins
        if not margins.lacking or not cls.loss_of(cfg).wanted.margins:
            return None
        return (
            f"{margins.lack}, and loss.margin_weight is above 0. Give every row `margin`, or both `score_chosen` and "
            f'`score_rejected`, as numbers (1.5, and not "1.5"); or leave loss.margin_weight out.'
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def start(self, run: Run, reference: Reference | None) -> None:
        super().start(run, reference)
        self.reference = reference

    def batch(self, step: int) -> Batch:
        return self.sampler.batch(step)

    def begin(self, step: int) -> OfflineStep:
        return self.step_of(self.batch(step), self.train)

    def step_of(self, batch: Batch, examples: Sequence[Answered], *, held_out: bool = False) -> OfflineStep:
        """Make a step of a batch; or, with `held_out`, the evaluation of one."""
        return OfflineStep(self, batch, examples, held_out=held_out)

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        """Run the held-out examples once, by the code of training, as one batch."""
        meter = Meter(self.run.world, self.run.device)
        with self.run.phases("eval"):
            whole = Batch(0, 0, tuple(range(len(self.held_out))))
            self.step_of(whole, self.held_out, held_out=True).evaluate(meter)
        values = {f"eval/{name}": value for name, value in self.buckets.completed(meter.reduce()).items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)} of the held-out {self.kind}s is not finite. A smaller optim.lr?"
            )
        return values

    def sharing(self) -> str | None:
        units = [unit_of(self.train[index]) for index in self.batch(1).indices]
        return shared_in_words(self.run.dealer, units)

    @functools.cached_property
    def held_out_dealt(self) -> Dealt:
        """The held-out examples, which are the same at each evaluation."""
        return self.run.dealer.deal_all(len(self.held_out), lambda place: unit_of(self.held_out[place]))

    def position(self) -> dict[str, Any] | None:
        return {"carried": dict(self.carried)} if self.carried else None

    def restore(self, folder: Path, position: Any, step: int) -> None:  # noqa: ARG002
        self.carried = position.get("carried", {}) if position else {}

    def passing(self, what: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Stand around a pass without gradient that comes before the first micro-batch; only `verify` looks at it."""
        return contextlib.nullcontext()

    # ---- a micro-batch ----

    def shard(self, examples: Sequence[Answered], names: Sequence[SequenceName] = ()) -> HeldExamples:
        """Return this rank's part of a micro-batch, on its device, with what is known of the examples."""
        return self.held(examples, replace(pack_examples(examples, **self.run.padding), names=tuple(names)))

    def held(self, examples: Sequence[Answered], pack: Pack) -> HeldExamples:
        run, shard = self.run, self.cut(pack)
        if self.reference is not None:
            shard = self.reference.known(pack, shard)
        tail_n = None
        if self.wanted.tail_weight < 1:
            weights = [part for each in examples for part in tail_weights(each, self.wanted.tail_weight)]
            tail_n = moved(listed(weights, torch.float64)[shard.listed_n], run.device)
        counts = np.array([[trained_tokens(*answer) for answer in each.answers] for each in examples])
        tokens_ES = moved(torch.from_numpy(counts.reshape(len(examples), len(self.sides))).double(), run.device)
        margin_E = None
        if self.wanted.margins:
            margins = [each.margin or 0.0 for each in examples]
            margin_E = moved(torch.tensor(margins, dtype=torch.float64), run.device)
        label_E = None
        if self.wanted.labels:
            label_E = moved(torch.tensor([each.label for each in examples], dtype=torch.float64), run.device)
        return HeldExamples(shard.to(run.device), self.by_side(tokens_ES.flatten()), margin_E, label_E, tail_n)

    def cut(self, pack: Pack) -> Shard:
        """Return this rank's part of a pack, in the host's memory."""
        return self.run.shard(pack)

    def by_side(self, values_S: Tensor) -> Sides:
        return {side: values_S[place :: len(self.sides)] for place, side in enumerate(self.sides)}

    def sums(self, values_n: Tensor, held: HeldExamples, *, weighted: bool = True) -> Sides:
        """Add up the values of each answer's trained tokens over the ring."""
        if weighted and held.tail_n is not None:
            values_n = values_n * held.tail_n
        return self.by_side(ring_sum(sum_by_sequence(values_n, held.shard), held.shard.ring))

    def reference_sums(self, held: HeldExamples) -> Sides | None:
        if self.reference is None:
            return None
        with self.run.phases("reference"):
            logps_n = self.reference.logps(held.shard)
        return self.sums(logps_n, held)

    def note(self, meter: Meter, values: Values, losses: Losses, slopes: Sides | None) -> None:  # noqa: ARG002
        """Meter the losses of a micro-batch's examples, and what belongs to them. `slopes` are the derivatives of a
        whole batch's loss by their values; only `verify` looks at them."""
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


@dataclass(frozen=True)
class HeldExamples(Held):
    """The examples of a micro-batch, and what is known of them beside the models' answers."""

    tokens: Sides  # trained tokens of each answer
    margin_E: Tensor | None
    label_E: Tensor | None
    tail_n: Tensor | None  # the weight of each token's log-probability
    places: tuple[int, ...] = ()  # of the examples in their batch


class OfflineStep(Step):
    """One train batch; or, with `held_out`, all held-out examples.

    `micro_batches` holds places in the batch.
    """

    def __init__(
        self, task: OfflineTask, batch: Batch, examples: Sequence[Answered], *, held_out: bool = False
    ) -> None:
        self.task, self.batch, self.held_out = task, batch, held_out
        self.examples = examples
        self.count = len(batch.indices)  # the loss's denominator, known before the first micro-batch
        self.mean_tokens = 1.0
        if task.wanted.mean_tokens:
            self.mean_tokens = mean_tokens(map(self.example, range(self.count)), self.count)
        self.take(task.held_out_dealt if held_out else self.deal(self.example), task.run.world.replica)
        self.whole: WholeBatch | None = None
        self.carried: Mapping[str, float] = task.carried
        self.kept: list[Sides | None] = []  # the reference's sums of the micro-batches to come, if they are known
        self.prepare()

    def prepare(self) -> None:
        """Run the passes without gradient that come before the first micro-batch. A collective call."""
        if self.task.wanted.whole_batch and len(self.micro_batches) > 1 and not self.held_out:
            self.choose_counted()
            with self.task.passing("collecting"):
                self.kept = [values.reference for _, values in self.collect()]

    def choose_counted(self) -> None:
        """Choose the micro-batches whose tensors are counted, before a pass without gradient."""
        self.task.run.phases.choose(self.tokens)

    def deal(self, example: Callable[[int], Answered]) -> Dealt:
        """Deal one example for each place of the batch."""
        dealer = self.task.run.dealer
        try:
            if self.held_out:
                return dealer.deal_all(self.count, lambda place: unit_of(example(place)))
            return dealer.deal([unit_of(example(place)) for place in range(self.count)])
        except TooLargeError as error:  # one that is made of several examples
            raise DataError(too_large(error, self.task.run.cfg, example(error.place).origin)) from None

    def example(self, place: int) -> Answered:
        return self.examples[self.batch.indices[place]]

    def names(self, indices: Sequence[int]) -> list[SequenceName]:
        """Name the sequences of a micro-batch."""
        return [
            SequenceName(self.held_out, self.batch.indices[place], answer)
            for place in indices
            for answer in range(len(self.task.sides))
        ]

    def load(self, indices: Sequence[int]) -> HeldExamples:
        with self.task.run.phases("data"):
            held = self.task.shard([*map(self.example, indices)], self.names(indices))
        return replace(held, places=tuple(indices))

    def loss(self, held: HeldExamples, meter: Meter) -> Tensor:
        values, tokens = self.values(held, self.kept.pop(0) if self.kept else None)
        replica_loss_sum = self.judged(values, held.places, meter)
        self.note_tokens(meter, tokens, held)
        if not held.places:  # a rank without a sample still runs its (empty) graph, so that no collective waits for it
            replica_loss_sum = replica_loss_sum + 0.0 * tokens[0].sum()
        return replica_loss_sum * (self.task.run.world.size / self.count)

    def values(self, held: HeldExamples, reference: Sides | None = None) -> tuple[Values, Any]:
        """Run the models on a micro-batch: the reference too, unless its sums are known already."""
        task = self.task
        if reference is None:  # first, while no activations are held
            reference = task.reference_sums(held)
        with task.run.phases("forward"):
            tokens = task.run.engine.forward(held.shard)
        return Values(
            logps=task.sums(tokens.logps_n, held),
            reference=reference,
            tokens=held.tokens,
            margin_E=held.margin_E,
            label_E=held.label_E,
            mean_tokens=self.mean_tokens,
            carried=task.carried,
            held_out=self.held_out,
            of_tokens={name: task.sums(each_n, held, weighted=False) for name, each_n in tokens.of_tokens.items()},
        ), tokens

    def judged(self, values: Values, places: Sequence[int], meter: Meter) -> Tensor:
        """Return the sum of the examples' losses, with the gradient that the train batch's loss has by their values."""
        slopes = None
        if self.task.wanted.whole_batch:
            if self.whole is None:  # one micro-batch a replica
                self.judge([(places, values)])
            assert self.whole is not None
            losses, slopes = self.whole.of_places(places)
            total = with_slopes(losses, slopes, values)
        else:
            losses = self.task.loss(values)
            total = losses.losses_E.sum()
        self.task.note(meter, values, losses, slopes)
        if self.held_out:
            self.task.buckets.note(meter, [*map(self.example, places)], losses)
        return total

    # ---- losses that ask for the whole batch ----

    @torch.no_grad()
    def collect(self, meter: Meter | None = None) -> list[tuple[Sequence[int], Values]]:
        """Run all micro-batches without gradient, and evaluate the loss on the values of the whole batch.

        Return the values of this replica's micro-batches, which are few numbers: their tokens are not kept.
        """
        found: list[tuple[Sequence[int], Values]] = []
        with self.task.run.phases("collect"):
            for indices in self.micro_batches:
                held = self.load(indices)
                values, tokens = self.values(held)
                if meter is not None:
                    self.note_tokens(meter, tokens, held)
                    note_tokens(meter, held.shard)
                found.append((held.places, values))
            self.judge(found)
        return found

    def judge(self, parts: Sequence[tuple[Sequence[int], Values]]) -> None:
        """Share the values of all replicas, and evaluate the loss on them. A collective call."""
        values = gathered(parts, self.count, self.task.run.world)
        self.whole = WholeBatch.of(self.task.loss, values, self.task.run.device)
        self.carried = self.whole.losses.carried

    def evaluate(self, meter: Meter) -> None:
        if self.task.wanted.whole_batch:
            for places, values in self.collect(meter):
                self.judged(values, places, meter)
            return
        for indices in self.micro_batches:
            held = self.load(indices)
            values, tokens = self.values(held)
            self.judged(values, held.places, meter)
            self.note_tokens(meter, tokens, held)
            note_tokens(meter, held.shard)

    def note_tokens(self, meter: Meter, tokens: Any, held: HeldExamples) -> None:
        """Meter what the model says of the answers' tokens beside what the loss is given: the mean logits."""
        task = self.task
        logits = task.by_side(sum_by_sequence(tokens.mean_logits_n, held.shard))
        trained = task.by_side(sum_by_sequence(torch.ones_like(tokens.mean_logits_n), held.shard))
        for side in task.sides:
            meter.add_mean(f"logits/{side}", logits[side].sum(), trained[side].sum(), SHARDED)

    # ---- the end of a step ----

    def finish(self, values: dict[str, float]) -> None:  # noqa: ARG002
        self.task.carried = self.carried

    def samples(self) -> list[str]:
        return [self.example(place).origin for place in range(self.count)]

    @torch.no_grad()
    def samples_without_finite_loss(self) -> list[str]:
        """Run each example of this replica alone and look; then tell the other replicas.

        Of a loss that asks for the whole batch, the values that it is given are looked at.
        """
        run, loss = self.task.run, self.task.loss
        mine = []
        for pack, indices in enumerate(self.micro_batches):
            for number in range(self.dealt.most_units(pack)):  # equally many passes on every replica
                values, _ = self.values(self.load(indices[number : number + 1]))
                sums = [*values.judged.values(), *(values.reference or {}).values()]
                if not self.task.wanted.whole_batch:
                    sums.append(loss(values).losses_E)
                if not all(bool(each.isfinite().all()) for each in sums):
                    mine.append(indices[number])
        everywhere = {place for each in gather_objects(mine, run.world.size) for place in each}
        return [self.example(place).origin for place in sorted(everywhere)]


def mean_tokens(examples: Iterable[Answered], count: int) -> float:
    """Return the mean number of trained tokens of the examples' first answers."""
    return sum(trained_tokens(*example.answers[0]) for example in examples) / count


def trained_tokens(answer: Any, mask: Any) -> int:
    return len(answer) if mask is None else int(np.count_nonzero(mask))


def tail_weights(example: Answered, weight: float) -> list[Floats]:
    """Return the weight of each trained token of an example's answers: less beyond the length of the shortest."""
    lengths = [trained_tokens(*answer) for answer in example.answers]
    return [np.where(np.arange(length) < min(lengths), 1.0, weight) for length in lengths]
