"""One train batch, each line an arrow of its way. Shape letters: P pairs, S = 2P sequences (chosen, rejected, …)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.algos.base import PairLogps
from rlexp.data.sampler import Batch
from rlexp.errors import NonFiniteError
from rlexp.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.ring.collectives import ring_sum
from rlexp.train.build import Run
from rlexp.types import Pair, Shard, TokenLogps

NAMED = 8  # samples named in an error


def train_step(run: Run, batch: Batch) -> dict[str, float]:
    """One optimizer step; the values of the train batch, the same on every rank."""
    started, sent = time.monotonic(), run.world.ring.traffic.sent
    seed_everything(run.cfg.seed, batch.step)
    run.phases.begin(batch.step)
    meter = Meter(run.world, run.device)
    finite = torch.ones((), dtype=torch.bool, device=run.device)
    held = 0
    count = len(batch.indices)  # the loss's denominator, known before the first micro-batch
    micro_batches = batch.micro_batches(run.world.replica, run.world.dp_size, run.cfg.train.micro_batch_size)
    for number, indices in enumerate(micro_batches, 1):
        with run.phases("data"):
            shard = run.shard([run.pairs[index] for index in indices])
        losses_P = pair_losses(run, shard, run.engine.forward, meter)
        note_balance(meter, shard)
        replica_loss_sum = losses_P.sum()
        with run.phases("backward"):
            run.engine.backward(replica_loss_sum * (run.world.size / count), last=number == len(micro_batches))
        finite &= losses_P.isfinite().all()
        held += len(shard.tokens_t)
    suspects = Suspects(
        [run.pairs[index].origin for index in batch.indices],
        lambda: [run.pairs[index].origin for index in _samples_without_finite_loss(run, micro_batches)],
    )
    return conclude(run, batch, meter, Taken(len(micro_batches), held, bool(finite), started, sent), suspects)


@dataclass(frozen=True)
class Taken:
    """Of the micro-batches of a step, before its optimizer has stepped."""

    micro_batches: int
    held: int  # tokens by this rank, padding too
    finite: bool  # every loss of this rank's
    started: float
    sent: int  # bytes around the ring before


@dataclass(frozen=True)
class Suspects:
    """By name, the samples of a train batch; and which of them have no finite loss. The latter is a collective call."""

    all: Sequence[str]
    find: Callable[[], Sequence[str]]


def conclude(run: Run, batch: Batch, meter: Meter, taken: Taken, suspects: Suspects) -> dict[str, float]:
    """The optimizer steps; the values of the train batch."""
    lr = run.schedule.at(batch.step)
    with run.phases("optimizer"):
        grad_norm = run.engine.grad_norm()
        refuse_unless_finite(run, batch.step, taken.finite, grad_norm, suspects)
        run.engine.step(lr)
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # once a step, so that its time and its memory are its own
    meter.add_max("ring_tokens", taken.held)
    meter.add_max("ring_bytes", run.world.ring.traffic.sent - taken.sent)
    meter.add_max("step_seconds", time.monotonic() - taken.started)
    run.phases.report(meter)
    values = meter.reduce()
    memory = peaks(values)
    train = {name: value for name, value in values.items() if not name.endswith("@rank")}
    train |= {name: int(train[name]) for name in ("tokens", "ring_tokens", "ring_bytes")}
    train |= {
        "grad_norm": grad_norm,
        "learning_rate": lr,
        "tokens_per_second": train["tokens"] / train["step_seconds"],
        "epoch": batch.step / run.steps_per_epoch,
        "global_step": batch.step,
        "grad_acc": run.cfg.train.grad_acc,
        "micro_batches": taken.micro_batches,
    }
    return {f"train/{name}": value for name, value in train.items()} | memory


def peaks(values: dict[str, float]) -> dict[str, float]:
    """Take the peaks out of the metered values: of each phase, and of all, with the rank that had it."""
    memory: dict[str, float] = {}
    for name in [name for name in values if name.endswith("peak")]:
        memory[f"memory/{name}_bytes"] = int(values.pop(name))
        memory[f"memory/{name}_rank"] = values.pop(f"{name}@rank")
    return memory


def seed_everything(seed: int, step: int) -> None:
    """Nothing here draws numbers; whatever code of a user's does, draws the same on every layout and after a stop."""
    mixed = int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed % (1 << 32))
    random.seed(mixed)


@torch.no_grad()
def evaluate(run: Run, step: int) -> dict[str, float]:
    """The held-out pairs once, in their order, by the same code; the last batch may be short."""
    meter = Meter(run.world, run.device)
    size = run.cfg.train.batch_size
    with run.phases("eval"):
        for first in range(0, len(run.eval_pairs), size):
            batch = Batch(0, 0, tuple(range(first, min(first + size, len(run.eval_pairs)))))
            for indices in batch.micro_batches(run.world.replica, run.world.dp_size, run.cfg.train.micro_batch_size):
                pair_losses(run, run.shard([run.eval_pairs[index] for index in indices]), run.engine.forward, meter)
    values = {f"eval/{name}": value for name, value in meter.reduce().items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"step {step}: {', '.join(bad)} of the held-out pairs is not finite. A smaller optim.lr?")
    return values


def pair_losses(run: Run, shard: Shard, policy: Callable[[Shard], TokenLogps], meter: Meter) -> Tensor:
    """The losses of a micro-batch's pairs, the same on every rank of the ring; its metrics go to the meter."""
    with run.phases("forward"):
        tokens = policy(shard)
    policy_P = by_pair(ring_sum(sum_by_sequence(tokens.logps_t, shard), run.world.ring))
    reference_P = None
    if run.reference is not None:
        with run.phases("reference"):
            reference_t = run.reference(shard).logps_t
        reference_P = by_pair(ring_sum(sum_by_sequence(reference_t, shard), run.world.ring))
    result = run.loss(policy_P, reference_P)
    pairs = len(result.losses_P)
    values_P = {"loss": result.losses_P, **result.metrics_P}
    values_P |= {"logps/chosen": policy_P.chosen_P, "logps/rejected": policy_P.rejected_P}
    for name, value_P in values_P.items():
        meter.add_mean(name, value_P.sum(), pairs, REPLICATED)
    logits = by_pair(sum_by_sequence(tokens.mean_logits_t, shard))
    trained = by_pair(sum_by_sequence(torch.ones_like(tokens.mean_logits_t), shard))
    meter.add_mean("logits/chosen", logits.chosen_P.sum(), trained.chosen_P.sum(), SHARDED)
    meter.add_mean("logits/rejected", logits.rejected_P.sum(), trained.rejected_P.sum(), SHARDED)
    meter.add_total("tokens", shard.real_tokens, SHARDED)
    # A rank without a sample still runs its (empty) graph, so that no collective waits for it.
    return result.losses_P + 0.0 * tokens.logps_t.sum() if pairs == 0 else result.losses_P


def note_balance(meter: Meter, shard: Shard) -> None:
    """How much longer than the mean of its ring the rank computes that has most attention to compute."""
    meter.add_mean("ring_balance", shard.most_work, shard.mean_work, REPLICATED)


def sum_by_sequence(values_t: Tensor, shard: Shard) -> Tensor:
    """Add up this rank's values of each sequence, (S,), in float64: thousands of terms, and differences after."""
    owner_t = torch.where(shard.sequence_t < 0, shard.sequences, shard.sequence_t)
    sums = torch.zeros(shard.sequences + 1, dtype=torch.float64, device=values_t.device)
    return sums.index_add(0, owner_t, values_t.double())[:-1]


def by_pair(values_S: Tensor) -> PairLogps:
    return PairLogps(values_S[0::2], values_S[1::2])


def refuse_unless_finite(run: Run, step: int, finite: bool, grad_norm: float, suspects: Suspects) -> None:
    """Before the optimizer step, on all ranks alike: a step with a NaN cannot be taken back."""
    bad = torch.tensor([0.0 if finite else 1.0], device=run.device)
    if run.world.size > 1:
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bool(bad == 0) and grad_norm != float("inf"):
        return
    what, names = "gradient", suspects.all
    if bool(bad):
        what, names = "loss", suspects.find() or suspects.all
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    raise NonFiniteError(
        f"step {step}: the {what} is not finite. Samples: {', '.join(names[:NAMED])}{more}. The optimizer has "
        f"not stepped. A smaller optim.lr, a warm-up or train.precision=fp32 may help; or the samples are at fault."
    )


@torch.no_grad()
def _samples_without_finite_loss(run: Run, micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """Run each sample of this replica alone and look; then tell the other replicas."""
    mine = []
    for indices in micro_batches:
        for place in range(run.cfg.train.micro_batch_size):  # as many passes on every replica
            pair: list[Pair] = [run.pairs[indices[place]]] if place < len(indices) else []
            losses_P = pair_losses(run, run.shard(pair), run.engine.forward, Meter(run.world, run.device))
            if pair and not bool(losses_P.isfinite().all()):
                mine.append(pair[0].index)
    found: list[list[int]] = [mine] * run.world.size
    if run.world.size > 1:
        dist.all_gather_object(found, mine)
    return sorted({index for each in found for index in each})
