"""Train on samples that the policy draws itself.

Shape letters: B samples of the train batch, S sequences of a micro-batch, n trained tokens of one rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.checks.micro_batches import scoring_at_once
from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.training.algos.advantages import sequence_weight, token_weight, whiten
from rlexp.training.algos.build import build_policy_loss
from rlexp.training.algos.policy_loss import PolicyTerms, PolicyTokens
from rlexp.training.dataset.sampler import Batch
from rlexp.training.dealer.of_run import most_tokens, room_of
from rlexp.training.dealer.packing import listed
from rlexp.training.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.training.reference.models import Reference
from rlexp.training.reference.stored import kept_dtype
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.rollout import saved
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.sinks.base import RolloutFacts
from rlexp.training.train.build_rollouts import build_source
from rlexp.training.train.examples import Examples, sampler_of
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.rollout_supply import Made, Rollouts, samples_of_step
from rlexp.training.train.sequence_sums import sum_by_sequence
from rlexp.training.train.surroundings import Surroundings
from rlexp.training.train.task import NOTHING, MicroBatch, Step, Task, Watch
from rlexp.training.types import CreditedSample, Shard, TokenLogps, moved

FASTEST = "time/sampling_fastest"


class RolloutTask(Task):
    kind = "prompt"
    rollouts: Rollouts  # from `start` on

    def __init__(self, cfg: Config, examples: Examples, bridge: Bridge | None, around: Surroundings) -> None:
        """`bridge` leads to the ranks that only sample."""
        assert isinstance(cfg.loss, PolicyLossConfig)
        self.cfg, self.loss_cfg = cfg.rollout, cfg.loss
        self.loss = build_policy_loss(cfg.loss, cfg.rollout.importance_cap)
        self.bridge, self.around = bridge, around
        self.wanted = replace(self.loss.wanted, temperature=cfg.rollout.temperature)
        self.wanted_of_evaluation = self.wanted.frozen  # which draws and asks for rewards, and compares with nothing
        self.examples = examples
        self.sampler = sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture)
        self.steps_per_epoch = self.sampler.steps_per_epoch * self.cfg.epochs * self.cfg.minibatches

    def start(self, run: TrainingRun, reference: Reference | None) -> None:
        super().start(run, reference)
        cfg, around = run.cfg, self.around
        rewards, at_once = around.rewards(cfg.reward), scoring_at_once(cfg)
        scoring = replace(run, layout=run.layout.with_room(most_tokens(cfg, at_once)))
        scorer = around.scorer(
            world=run.world,
            dealer=replace(run.dealer, replicas=1, room=room_of(cfg, at_once)),
            pack=run.pack,
            hold=scoring.to_device,
            policy=run.engine.forward,
            reference=reference,
            reward_models=[around.reward_model(run, term) for term in rewards.models],
            dtype=kept_dtype(cfg.train.precision),
            together=run.engine.sharded,
        )
        self.rollouts = around.rollouts(
            run=run,
            loss_cfg=self.loss_cfg,
            loss=self.loss,
            examples=self.examples,
            sampler=self.sampler,
            source=build_source(run, self.bridge, around),
            rewards=rewards,
            scorer=scorer,
            host=around.host(run.world),
        )

    def batch(self, step: int) -> Batch:
        return samples_of_step(self.cfg, self.run.cfg.seed, self.run.cfg.train.batch_size, step)

    def begin(self, step: int, watch: Watch = NOTHING) -> RolloutStep:
        """Begin a step. The first step of a rollout draws it."""
        return RolloutStep(self, step, self.rollouts.ensure(step), watch)

    def evaluated(self, watch: Watch) -> dict[str, float]:  # noqa: ARG002
        return self.rollouts.evaluate()

    def news(self, step: int) -> RolloutFacts | None:
        return self.rollouts.facts_of(step)

    def position(self) -> dict[str, Any]:
        return self.rollouts.position()

    def writer(self, step: int) -> Callable[[Path], list[Path]]:
        unfinished, world = self.rollouts.unfinished(step), self.run.world

        def write(folder: Path) -> list[Path]:
            return [saved.write(folder, name, world.rank, world.size, samples) for name, samples in unfinished.items()]

        return write

    def restore(self, folder: Path, position: Any, step: int) -> None:
        if self.examples.train:  # an evaluation has none, and no rollout to go on with
            self.rollouts.restore(folder, position, step)

    def finish(self) -> None:
        self.rollouts.source.finish()

    def close(self) -> None:
        self.rollouts.rewards.close()

    def describe(self) -> str:
        cfg = self.cfg
        return (
            f"{super().describe()}, a rollout is {cfg.batch_size} × {cfg.n_samples} samples for "
            f"{cfg.epochs} epoch{'s' * (cfg.epochs > 1)} × {cfg.minibatches} train batches"
        )


@dataclass(frozen=True)
class SamplesMicroBatch(MicroBatch):
    """The samples of a micro-batch, and what is known of their tokens beside the policy's answers."""

    samples: tuple[CreditedSample, ...]
    known: dict[str, Tensor | None]


class RolloutStep(Step):
    def __init__(self, task: RolloutTask, number: int, made: Made | None, watch: Watch = NOTHING) -> None:
        rollouts = task.rollouts
        self.task, self.made, self.watch = task, made, watch
        self.drawn_at = time.monotonic()
        self.batch = task.batch(number)
        with task.run.phases("data"):
            self.weighed = Weighed.of(task, rollouts.samples(self.batch))
        samples = self.weighed.samples
        units = [[np.concatenate((sample.example.prompt, sample.answer))] for sample in samples]
        self.take(task.run.dealer.deal(units), task.run.world.replica)

    def load(self, number: int) -> SamplesMicroBatch:
        run, indices = self.task.run, self.micro_batches[number]
        with run.phases("data"):
            samples = [self.weighed.samples[index] for index in indices]
            sequences = [(sample.example.prompt, sample.answer) for sample in samples]
            pack = run.pack(sequences, self.forests[number])
            shard = run.shard(pack)
            known = laid_out(self.task, self.weighed, indices, shard)
            columns = {name: None if column is None else moved(column, run.device) for name, column in known.items()}
            batch = SamplesMicroBatch(shard.to(run.device), tuple(samples), columns)
        self.watch.loaded(self, batch, pack)
        return batch

    def loss(self, batch: SamplesMicroBatch, meter: Meter) -> Tensor:
        run, rollouts = self.task.run, self.task.rollouts
        with run.phases("forward"):
            outputs = run.engine.forward(batch.shard)
        self.watch.returned(batch, outputs)
        tokens = tokens_of(batch, outputs)
        terms = self.task.loss(tokens, rollouts.kl_coef)
        self.watch.judged(batch, tokens, terms)
        note(terms, tokens, meter)
        return (terms.loss + 0.0 * everything(tokens)) * run.world.size

    def samples(self) -> list[str]:
        return [sample.example.origin for sample in self.weighed.samples]

    def measure(self, meter: Meter) -> None:
        """Meter the seconds of the slowest rank by phase; of sampling, the fastest rank's too, with its sign turned."""
        meter.add_max("time/train", time.monotonic() - self.drawn_at)
        if self.made is not None:
            for phase, seconds in self.made.seconds.items():
                meter.add_max(f"time/{phase}", seconds)
            meter.add_max(FASTEST, -self.made.seconds["sampling"])

    def finish(self, values: dict[str, float]) -> None:
        rollouts = self.task.rollouts
        values["train/episode"] = (rollouts.number + 1) * rollouts.size
        if self.made is not None:
            values |= {f"train/{name}": value for name, value in self.made.values.items()}
            values[f"train/{FASTEST}"] *= -1
            spent = values["train/time/rollout"] + values["train/time/score"]
            values["train/samples_per_second"] = rollouts.size / spent


@dataclass(frozen=True)
class Weighed:
    """A train batch, with the weights of its tokens and samples in the loss."""

    samples: Sequence[CreditedSample]
    advantages: Sequence[Tensor]
    token_B: Tensor
    sequence_B: Tensor

    @staticmethod
    def of(task: RolloutTask, samples: Sequence[CreditedSample]) -> Weighed:
        """Every rank has the whole train batch before its first micro-batch, and comes to the same numbers."""
        cfg = task.loss_cfg
        counts_B = torch.tensor([sample.counts for sample in samples])
        lengths_B = torch.tensor([len(sample.answer) for sample in samples])
        advantages = [torch.from_numpy(sample.advantages).double() for sample in samples]
        if cfg.whiten:
            advantages = whiten(advantages, counts_B)
        token_B = token_weight(cfg.normalize, lengths_B, counts_B, task.cfg.max_new_tokens)
        return Weighed(samples, advantages, token_B, sequence_weight(counts_B))


def laid_out(task: RolloutTask, batch: Weighed, indices: Sequence[int], shard: Shard) -> dict[str, Tensor | None]:
    """Lay out on the host what is known of the micro-batch's tokens, as this rank holds them, without the infinities of
    samples that do not count."""
    samples = [batch.samples[index] for index in indices]
    dtype = torch.promote_types(task.run.dtype, torch.float32)
    critic = task.wanted.values is not None

    def spread(arrays: Sequence[np.ndarray]) -> Tensor:
        finite = [array if each.counts else np.where(np.isfinite(array), array, 0.0)
                  for each, array in zip(samples, arrays, strict=True)]  # fmt: skip
        return listed(finite, dtype)[shard.listed_n]

    def field(name: str) -> Tensor | None:
        if samples and getattr(samples[0], name) is None:
            return None
        return spread([getattr(sample, name) for sample in samples])

    lengths = [len(sample.answer) for sample in samples]
    weights = [np.full(length, float(batch.token_B[index])) for index, length in zip(indices, lengths, strict=True)]
    return {
        "old_n": field("old"),
        "behaviour_n": field("behaviour"),
        "reference_n": field("reference") if task.wanted.reference else None,
        "advantages_n": spread([batch.advantages[index].numpy() for index in indices]),
        "old_values_n": field("values") if critic else None,
        "returns_n": field("returns") if critic else None,
        "weight_n": spread(weights),
        "trained_n": spread([np.full(len(sample.answer), float(sample.counts)) for sample in samples]),
        "sequence_n": shard.sequence_n,
        "weight_S": batch.sequence_B[torch.tensor(indices, dtype=torch.int64)].to(dtype),
        "length_S": torch.tensor(lengths, dtype=dtype),
    }


def everything(tokens: PolicyTokens) -> Tensor:
    """Return a sum of all that the model has computed. So a rank without a sample, or without a token that counts, runs
    its graph too, and no collective waits for it."""
    first, *others = (each_n.sum() for each_n in (tokens.logps_n, tokens.values_n) if each_n is not None)
    return sum(others, start=first)


def tokens_of(batch: SamplesMicroBatch, outputs: TokenLogps) -> PolicyTokens:
    """Put together what is known of the tokens. The probability of one that does not count may be 0, and 0 × −inf is no
    number: such infinities are left out, here and in `laid_out`."""
    assert outputs.entropies_n is not None
    known: dict[str, Any] = batch.known
    logps_n = outputs.logps_n
    if not all(sample.counts for sample in batch.samples):
        logps_n = logps_n.where(known["trained_n"] > 0, logps_n.nan_to_num(nan=math.nan, neginf=0.0))
    return PolicyTokens(
        logps_n=logps_n,
        entropy_n=outputs.entropies_n,
        values_n=outputs.values_n,
        **known,
        by_sequence=lambda values_n: ring_sum(sum_by_sequence(values_n, batch.shard), batch.shard.ring),
    )


@torch.no_grad()
def note(terms: PolicyTerms, tokens: PolicyTokens, meter: Meter) -> None:
    """Meter the parts of the loss as sums over the train batch, and means over its trained tokens."""
    whole = sum(terms.replicated.values(), start=torch.zeros_like(terms.loss))
    meter.add_total("loss", terms.loss - whole, SHARDED)
    meter.add_total("loss", whole, REPLICATED)
    for name, part in terms.weighted.items():
        meter.add_total(name, part, SHARDED)
    for name, part in terms.replicated.items():
        meter.add_total(name, part, REPLICATED)
    trained_n = tokens.trained_n
    for name, value_n in terms.means_n.items():
        meter.add_mean(name, (value_n * trained_n).sum(), trained_n.sum(), SHARDED)
    for name, value_n in terms.peaks_n.items():
        there_n = value_n.masked_fill(trained_n <= 0, -math.inf)
        meter.add_max(name, there_n.max() if len(there_n) else -math.inf)
