"""Train on preference pairs.

Shape letters: P pairs, S = 2P sequences (chosen, rejected, …), t tokens of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlexp.base.errors import NonFiniteError
from rlexp.config.schema import Config
from rlexp.training.algos.base import PairLogps, PreferenceLoss
from rlexp.training.dataset.packing import pack_pairs
from rlexp.training.dataset.sampler import Batch, Sampler
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.objects import gather_objects
from rlexp.training.train.examples import Examples, pair_sampler
from rlexp.training.train.parts import Reference, Run
from rlexp.training.train.sequence_sums import sum_by_sequence
from rlexp.training.train.step import note_tokens
from rlexp.training.train.task import Held, Needs, Step, Task
from rlexp.training.types import Pair, Shard, TokenLogps


class PairTask(Task):
    kind = "pair"
    reference: Reference | None

    def __init__(self, cfg: Config, examples: Examples, loss: PreferenceLoss) -> None:
        self.loss = loss
        self.needs = Needs(reference=loss.needs_reference)
        self.examples = examples
        self.pairs: Sequence[Pair] = self.examples.train
        self.eval_pairs: Sequence[Pair] = self.examples.held_out
        self.sampler: Sampler = pair_sampler(cfg, len(self.pairs), examples.mixture)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def start(self, run: Run, reference: Reference | None) -> None:
        super().start(run, reference)
        self.reference = reference

    def batch(self, step: int) -> Batch:
        return self.sampler.batch(step)

    def begin(self, step: int) -> PairStep:
        return PairStep(self, self.batch(step))

    def micro_batches(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return this replica's micro-batches of a train batch."""
        world = self.run.world
        return batch.micro_batches(world.replica, world.dp_size, self.run.cfg.train.micro_batch_size)

    def shard(self, pairs: Sequence[Pair]) -> Shard:
        """Return this rank's part of a micro-batch, on its device."""
        return self.run.to_device(pack_pairs(pairs, **self.run.padding))

    def losses(self, shard: Shard, meter: Meter) -> Tensor:
        """Return the loss of each pair, the same on every rank of the ring; the metrics go to the meter."""
        ring, phases = self.run.world.ring, self.run.phases
        with phases("forward"):
            tokens = self.run.engine.forward(shard)
        policy_P = by_pair(ring_sum(sum_by_sequence(tokens.logps_t, shard), ring))
        reference_P = None
        if self.reference is not None:
            with phases("reference"):
                reference_t = self.reference(shard).logps_t
            reference_P = by_pair(ring_sum(sum_by_sequence(reference_t, shard), ring))
        result = self.loss(policy_P, reference_P)
        pairs = len(result.losses_P)
        values_P = {"loss": result.losses_P, **result.metrics_P}
        values_P |= {"logps/chosen": policy_P.chosen_P, "logps/rejected": policy_P.rejected_P}
        for name, value_P in values_P.items():
            meter.add_mean(name, value_P.sum(), pairs, REPLICATED)
        note_logits(meter, tokens, shard)
        # A rank without a sample still runs its (empty) graph, so that no collective waits for it.
        return result.losses_P + 0.0 * tokens.logps_t.sum() if pairs == 0 else result.losses_P

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        """Run the held-out pairs once, in their order, by the code of training; the last batch may be short."""
        meter = Meter(self.run.world, self.run.device)
        size, total = self.run.cfg.train.batch_size, len(self.eval_pairs)
        with self.run.phases("eval"):
            for first in range(0, total, size):
                batch = Batch(0, 0, tuple(range(first, min(first + size, total))))
                for indices in self.micro_batches(batch):
                    shard = self.shard([self.eval_pairs[index] for index in indices])
                    self.losses(shard, meter)
                    note_tokens(meter, shard)
        values = {f"eval/{name}": value for name, value in meter.reduce().items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)} of the held-out pairs is not finite. A smaller optim.lr?"
            )
        return values


class PairStep(Step):
    def __init__(self, task: PairTask, batch: Batch) -> None:
        self.task = task
        self.batch = batch
        self.count = len(batch.indices)  # the loss's denominator, known before the first micro-batch
        self.micro_batches = task.micro_batches(batch)

    def tokens(self, indices: Sequence[int]) -> int:
        pairs = [self.task.pairs[index] for index in indices]
        lengths = [len(pair.prompt) + len(answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        return self.task.run.packed_tokens(lengths)

    def load(self, indices: Sequence[int]) -> Held:
        task = self.task
        with task.run.phases("data"):
            return Held(task.shard([task.pairs[index] for index in indices]))

    def loss(self, held: Held, meter: Meter) -> Tensor:
        replica_loss_sum = self.task.losses(held.shard, meter).sum()
        return replica_loss_sum * (self.task.run.world.size / self.count)

    def samples(self) -> list[str]:
        return [self.task.pairs[index].origin for index in self.batch.indices]

    @torch.no_grad()
    def samples_without_finite_loss(self) -> list[str]:
        """Run each pair of this replica alone and look; then tell the other replicas."""
        task, run = self.task, self.task.run
        mine = []
        for indices in self.micro_batches:
            for place in range(run.cfg.train.micro_batch_size):  # equally many passes on every replica
                pair = [task.pairs[indices[place]]] if place < len(indices) else []
                losses_P = task.losses(task.shard(pair), Meter(run.world, run.device))
                if pair and not bool(losses_P.isfinite().all()):
                    mine.append(pair[0].index)
        everywhere = {index for each in gather_objects(mine, run.world.size) for index in each}
        return [task.pairs[index].origin for index in sorted(everywhere)]


def note_logits(meter: Meter, tokens: TokenLogps, shard: Shard) -> None:
    """Meter the mean logits of the answers' tokens."""
    logits = by_pair(sum_by_sequence(tokens.mean_logits_t, shard))
    trained = by_pair(sum_by_sequence(torch.ones_like(tokens.mean_logits_t), shard))
    meter.add_mean("logits/chosen", logits.chosen_P.sum(), trained.chosen_P.sum(), SHARDED)
    meter.add_mean("logits/rejected", logits.rejected_P.sum(), trained.rejected_P.sum(), SHARDED)


def by_pair(values_S: Tensor) -> PairLogps:
    return PairLogps(values_S[0::2], values_S[1::2])
