"""Defects of the training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.training.metrics.meter import REPLICATED, SHARDED
from rlexp.training.model.policy import cast_parameters
from rlexp.training.reference.models import Reference
from rlexp.training.world.groups import ALONE, World
from tests.helpers.faults.base import EMPTY_REPLICA, SHORT_BATCH, TRAIN, nothing, one
from tests.helpers.faults.plant import Altered, Change, Seeing


def scaled(factor: Callable[[Any, int], float]) -> Change:
    """Multiply the loss of a micro-batch by a function of the step and its number of pairs."""

    def change(original: Any, self: Any, held: Any, meter: Any) -> Any:
        return original(self, held, meter) * factor(self, len(held.places))

    return change


def whole_batch(step: Any, _pairs: int) -> float:
    return len(step.batch.indices) / float(step.task.run.cfg.train.batch_size)


def every_one_last(original: Any, task: Any, number: int, watch: Any) -> Any:
    def ending(backward: Any) -> Callable[..., None]:
        return lambda loss, **_last: backward(loss, last=True)

    misled = Altered(watch, handed=lambda handed: lambda batch, loss, _last: handed(batch, loss, True))
    return original(with_run(task, engine=Altered(task.run.engine, backward=ending)), number, misled)


def with_run(task: Any, **changes: Any) -> Any:
    """Copy the task, with another run."""
    other = copy.copy(task)
    other.run = replace(task.run, **changes)
    return other


def one_too_few(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.micro_batches = self.micro_batches[:-1]


def of_replica_0(original: Any, self: Any, task: Any, *args: Any, **kwargs: Any) -> None:
    world = task.run.world
    original(self, with_run(task, world=replace(world, rank=world.ring.rank)), *args, **kwargs)
    self.task = task


def one_for_none(original: Any, self: Any, values: Any, places: Any, *args: Any) -> Any:
    total, *more = original(self, values, places, *args)
    return (total if places else total + 1.0, *more)


def in_float32(original: Any, values_n: Any, shard: Any) -> Any:
    return original(values_n.float(), shard).float().double()


def own_reference(original: Any, self: Any, held: Any, *known: Any) -> Any:
    step, task = copy.copy(self), copy.copy(self.task)
    task.reference = Told(torch.no_grad()(lambda shard: task.run.engine.forward(shard).logps_n))
    step.task = task
    return original(step, held, *known)


class Told(Reference):
    """A reference that says what a function says."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self.function = function

    def logps(self, shard: Any) -> Tensor:
        return self.function(shard)


def learning(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the trained policy, which is built first, for the reference too."""
    policies: list[Any] = []

    def kept(build_policy: Any) -> Callable[..., Any]:
        return lambda *args: policies.append(build_policy(*args)) or policies[-1]

    def trained(_build_reference: Any) -> Callable[..., Any]:
        return lambda *_args: Told(torch.no_grad()(lambda shard: policies[0](shard).logps_n))

    names = Seeing({"build_policy": kept, "build_reference": trained})
    return names.of(original, nothing)(*args, **kwargs)


def starting_in_bfloat16(original: Any, cfg: Any, starting: Any, *args: Any, **kwargs: Any) -> Any:
    cast_parameters(starting, torch.bfloat16)
    return original(cfg, starting, *args, **kwargs)


def too_early(original: Any, self: Any, step: int) -> float:
    steps = self.warmup_steps
    return original(self, step) * ((steps + 1) / steps if step <= steps else 1.0)


def next_rate(original: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    schedule = Altered(run.schedule, at=lambda at: lambda step: at(step + 1))
    return original(replace(run, schedule=schedule), *args, **kwargs)


def per_pair(original: Any, self: Any, meter: Any, tokens: Any, held: Any) -> None:
    def adding(add: Any) -> Callable[..., None]:
        pairs = held.shard.sequences // 2
        return lambda name, total, count, spread: add(name, total, pairs if "chosen" in name else count, spread)

    original(self, Altered(meter, add_mean=adding), tokens, held)


def of_one_rank(original: Any, task: Any, step: Any, meter: Any, *args: Any) -> Any:
    """Log the loss of this rank's own sums."""
    own = copy.copy(meter)
    own.world = World(0, 1, ALONE)
    reducing = {"reduce": lambda reduce: lambda: reduce() | {"loss": own.reduce().get("loss", 0.0)}}
    return original(task, step, Altered(meter, **reducing), *args)


def forgetting(original: Any, task: Any, sinks: Any, position: Any = None, *args: Any, **kwargs: Any) -> Any:
    from rlexp.training.train.loop import Position

    position = position or Position()

    def anew(take: Any) -> Callable[..., Any]:
        return lambda *args: (setattr(position, "total_tokens", 0), take(*args))[1]

    return Seeing({"train_step": anew}).of(original, nothing)(task, sinks, position, *args, **kwargs)


def first_again(original: Any, self: Any) -> Any:
    """Evaluate each replica's first pack twice."""
    dealt = original(self)
    packs, sizes = (tuple((*each, each[0]) for each in every) for every in (dealt.packs, dealt.sizes))
    return replace(dealt, packs=packs, sizes=sizes)


STEP, ROWS_TASK, SCHEDULE = "train.step:", "train.rows_task:", "train.schedule:Schedule.at"
TRAIN_FAULTS = (
    one("the world is not in the scale", ROWS_TASK + "RowsStep.loss",
        scaled(lambda step, _: 1 / step.task.run.world.size), "loss", TRAIN),
    one("divided by the accumulation again", ROWS_TASK + "RowsStep.loss",
        scaled(lambda step, _: 1 / len(step.micro_batches)), "loss", TRAIN),
    one("mean of means", ROWS_TASK + "RowsStep.loss", scaled(lambda _, pairs: 1 / pairs), "loss", TRAIN),
    one("divided by the whole batch", ROWS_TASK + "RowsStep.loss", scaled(whole_batch), "loss", TRAIN, *SHORT_BATCH,
        step=2),
    one("every micro-batch is the last", STEP + "train_step", every_one_last, "loss", TRAIN),
    one("the last micro-batch is left out", ROWS_TASK + "RowsStep.__init__", one_too_few, "data", TRAIN),
    one("a replica takes the other's pairs", ROWS_TASK + "RowsStep.__init__", of_replica_0, "data", TRAIN),
    one("an empty replica adds", ROWS_TASK + "RowsStep.judged", one_for_none, "loss", TRAIN, *EMPTY_REPLICA, step=2),
    one("sums in float32", "train.sequence_sums:sum_by_sequence", in_float32, "log-probabilities", TRAIN),
    one("the sides of a pair swapped", ROWS_TASK + "RowsTask.by_side",
        lambda original, *args: dict(zip(right, reversed(right.values()), strict=True))
        if (right := original(*args)) else right,
        "log-probabilities", TRAIN),
    one("the policy is its own reference", ROWS_TASK + "RowsStep.values", own_reference, "log-probabilities", TRAIN),
    one("the reference learns", "train.build:build", learning, "log-probabilities", TRAIN, step=2),
    one("the reference in float32", "train.build:build_frozen", starting_in_bfloat16, "log-probabilities", TRAIN),
    one("warm-up off by one", SCHEDULE, too_early, "optimizer", TRAIN),
    one("decay off by one", SCHEDULE, lambda original, self, step: original(self, step + 1), "optimizer", TRAIN,
        "optim.warmup_steps=0"),
    one("the next step's rate", STEP + "optimize", next_rate, "optimizer", TRAIN),
    one("tokens counted by each rank of the ring", STEP + "note_tokens", Seeing({"REPLICATED": lambda _: SHARDED}),
        "metrics", TRAIN),
    one("shared tokens of one rank", STEP + "note_sharing", Seeing({"SHARDED": lambda _: REPLICATED}), "metrics",
        TRAIN),
    one("logits per pair", ROWS_TASK + "RowsStep.note_logits", per_pair, "metrics", TRAIN),
    one("loss of rank 0", STEP + "row_of", of_one_rank, "metrics", TRAIN),
    one("epochs as whole numbers", STEP + "row_of",
        lambda original, task, step, *args: original(task, step, *args) | {"train/epoch": float(step.batch.epoch)},
        "metrics", TRAIN),
    one("total tokens start anew", "train.loop:train_loop", forgetting, "metrics", TRAIN, step=2),
    one("a step too few", "train.loop:last_step", lambda original, *args: original(*args) - 1, "data", TRAIN),
    one("held-out pairs twice", ROWS_TASK + "RowsTask.held_out_dealt", first_again, "metrics", TRAIN,
        "data.eval_size=13", "train.eval_every=1"),
)  # fmt: skip
