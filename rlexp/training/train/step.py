"""One optimizer step of any task."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from rlexp.base.errors import NonFiniteError
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter, Stopwatch
from rlexp.training.train.operations import note_operations, speed
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.task import NOTHING, MicroBatch, Step, Task, Watch
from rlexp.training.types import Shard

NAMED = 8  # samples named in an error


def train_step(task: Task, number: int, watch: Watch = NOTHING) -> dict[str, float]:
    """Take one optimizer step, at which `watch` looks on; return the train batch's values, the same on every rank."""
    run = task.run
    began, sent = time.monotonic(), run.world.ring.traffic.sent
    seed_everything(run.cfg.seed, number)
    run.phases.begin(number)
    meter = Meter(run.world, run.device)
    step = task.begin(number, watch)
    run.phases.choose(step.tokens)
    step.prepared = step.prepare()
    watch.prepared(step)
    finite = torch.ones((), dtype=torch.bool, device=run.device)
    tokens = 0
    coming = loading(run, step)
    batch: MicroBatch | None = next(coming)
    ready = Stopwatch(run.device)  # for the last backward pass, in which engines reduce
    for place in range(len(step.micro_batches)):
        with run.phases.micro_batch(place):
            assert batch is not None
            loss = step.loss(batch, meter)
            note_tokens(meter, batch.shard)
            note_sharing(meter, batch.shard)
            note_balance(meter, batch.shard)
            note_operations(meter, batch.shard, run.operations)
            tokens += len(batch.shard.tokens_t)
            following = next(coming, None)  # packed and copied while the device computes this one
            ready.stop()
            last = following is None
            watch.handed(batch, loss, last)
            with run.phases("backward"):
                run.engine.backward(loss, last=last)
            finite &= loss.detach().isfinite()
            batch = following
    watch.differentiated(step)
    step.measure(meter)
    meter.add_max("replica_skew", step.dealt.skew)
    optimizer = optimize(run, step, finite=bool(finite))
    meter.add_spread("replica_wait_seconds", ready.seconds())
    meter.add_max("ring_tokens", tokens)
    meter.add_max("ring_bytes", run.world.ring.traffic.sent - sent)
    meter.add_max("step_seconds", time.monotonic() - began)
    values = row_of(task, step, meter, optimizer)
    step.finish(values)
    return values


def loading(run: TrainingRun, step: Step) -> Iterator[MicroBatch]:
    """Yield the step's micro-batches on their way to the device."""
    for number in range(len(step.micro_batches)):
        with run.phases.micro_batch(number):
            batch = step.load(number)
        yield batch
        del batch  # the caller's to free


def optimize(run: TrainingRun, step: Step, *, finite: bool) -> dict[str, float]:
    """Step the optimizer unless a loss or the gradient is not finite; return gradient norm and learning rate."""
    lr = run.schedule.at(step.batch.step)
    with run.phases("optimizer"):
        grad_norm = run.engine.grad_norm()
        refuse_unless_finite(run, step, finite, grad_norm)
        run.engine.step(lr)
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # once a step, so that its time and its memory are its own
    return {"grad_norm": grad_norm, "learning_rate": lr}


def row_of(task: Task, step: Step, meter: Meter, optimizer: dict[str, float]) -> dict[str, float]:
    """Reduce the meter over the ranks and name the values as they are logged."""
    run, batch = task.run, step.batch
    run.phases.report(meter)
    values = meter.reduce()
    memory = peaks(values)
    train = {name: value for name, value in values.items() if not name.endswith("@rank")}
    train |= {name: int(train[name]) for name in ("tokens", "shared_tokens", "ring_tokens", "ring_bytes")}
    train |= optimizer | speed(train, run.world.size, run.peak)
    train |= {
        "tokens_per_second": train["tokens"] / train["step_seconds"],
        "epoch": batch.step / task.steps_per_epoch,
        "global_step": batch.step,
        "grad_acc": len(step.micro_batches),
        "micro_batches": len(step.micro_batches),
    }
    return {f"train/{name}": value for name, value in train.items()} | memory


def peaks(values: dict[str, float]) -> dict[str, float]:
    """Take the peaks out of the metered values: one for each phase and one overall, each with its rank."""
    memory: dict[str, float] = {}
    for name in [name for name in values if name.endswith("peak")]:
        memory[f"memory/{name}_bytes"] = int(values.pop(name))
        memory[f"memory/{name}_rank"] = values.pop(f"{name}@rank")
    return memory


def seed_everything(seed: int, step: int) -> None:
    """Seed the generators. Nothing here draws from them; a user's own code draws the same numbers on every layout."""
    mixed = int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed % (1 << 32))
    random.seed(mixed)


def note_tokens(meter: Meter, shard: Shard) -> None:
    """Meter the tokens of all sequences: those that are computed once for several count for each."""
    meter.add_total("tokens", shard.sequence_tokens, REPLICATED)


def note_sharing(meter: Meter, shard: Shard) -> None:
    """Meter the tokens that need not be computed, because others stand for them."""
    meter.add_total("shared_tokens", shard.sequence_tokens, REPLICATED)
    meter.add_total("shared_tokens", -shard.real_tokens, SHARDED)


def note_balance(meter: Meter, shard: Shard) -> None:
    """Meter the attention work and the tokens of the ring's busiest rank relative to the ring's mean, how many ranks
    hold each sequence, and what was estimated of the slowest rank."""
    meter.add_mean("ring_balance", shard.most_work, shard.mean_work, REPLICATED)
    size = shard.ring.size
    if size == 1:
        return
    meter.add_mean("ring_tokens_balance", shard.most_tokens, shard.ring_tokens / size, REPLICATED)
    for width in (1 << power for power in range(size.bit_length())):
        count = sum(width <= each < 2 * width for each in shard.widths_S)
        meter.add_total(f"ring_width_{width}", count, REPLICATED)
    if shard.estimate is not None:
        meter.add_mean("ring_estimate", *shard.estimate, REPLICATED)


def refuse_unless_finite(run: TrainingRun, step: Step, finite: bool, grad_norm: float) -> None:
    """Raise on all ranks before the optimizer step: a step with a NaN cannot be taken back."""
    bad = torch.tensor([0.0 if finite else 1.0], device=run.device)
    if run.world.size > 1:
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bool(bad == 0) and grad_norm != float("inf"):
        return
    what, names = "gradient", step.samples()
    if bool(bad):
        what, names = "loss", step.samples_without_finite_loss() or names
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    raise NonFiniteError(
        f"step {step.batch.step}: the {what} is not finite. Samples: {', '.join(names[:NAMED])}{more}. The optimizer "
        f"has not stepped. A smaller optim.lr, a warm-up or train.precision=fp32 may help; or the samples are at fault."
    )
