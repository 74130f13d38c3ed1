"""One optimizer step of a run that draws its own samples. Shape letters: B samples of the train batch, S sequences of a
micro-batch, T tokens of its pack, t of one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlexp.algos.policy import PolicyTerms, PolicyTokens
from rlexp.algos.weights import sequence_weight, token_weight
from rlexp.algos.whiten import whiten
from rlexp.data.sampler import Batch
from rlexp.errors import NonFiniteError
from rlexp.metrics.meter import REPLICATED, SHARDED, Meter
from rlexp.ring.collectives import ring_sum
from rlexp.rollout.experience import on_pack
from rlexp.train.build import Run
from rlexp.train.rollouts import Made
from rlexp.train.step import Suspects, Taken, conclude, note_balance, seed_everything, sum_by_sequence
from rlexp.types import Pack, Sample, Shard, TokenLogps

FASTEST = "time/sampling_fastest"


def policy_step(run: Run, step: int) -> dict[str, float]:
    """The values of the train batch, the same on every rank; with those of its rollout, where that is new."""
    rollouts = run.rollouts
    assert rollouts is not None
    started, sent = time.monotonic(), run.world.ring.traffic.sent
    seed_everything(run.cfg.seed, step)
    run.phases.begin(step)
    meter = Meter(run.world, run.device)
    made = rollouts.ensure(step)
    training = time.monotonic()
    batch = rollouts.batch(step)
    with run.phases("data"):
        weighed = Weighed.of(run, rollouts.samples(batch))
    within = Batch(step, batch.epoch, tuple(range(len(batch.indices))))  # by their places in the train batch
    micro_batches = within.micro_batches(run.world.replica, run.world.dp_size, run.cfg.train.micro_batch_size)
    finite = torch.ones((), dtype=torch.bool, device=run.device)
    held = 0
    for number, indices in enumerate(micro_batches, 1):
        loss, tokens_held = micro_loss(run, weighed, indices, meter)
        with run.phases("backward"):
            run.engine.backward(loss * run.world.size, last=number == len(micro_batches))
        finite &= loss.detach().isfinite()
        held += tokens_held
    note_times(meter, made, time.monotonic() - training)
    names = [sample.prompt.origin for sample in weighed.samples]
    suspects = Suspects(names, lambda: names)
    values = conclude(run, batch, meter, Taken(len(micro_batches), held, bool(finite), started, sent), suspects)
    values["train/episode"] = (rollouts.number + 1) * rollouts.size
    if made is not None:
        values |= {f"train/{name}": value for name, value in made.values.items()}
        values[f"train/{FASTEST}"] *= -1
        spent = values["train/time/rollout"] + values["train/time/score"]
        values["train/samples_per_second"] = rollouts.size / spent
    return values


def note_times(meter: Meter, made: Made | None, training: float) -> None:
    """Seconds of the slowest rank by phase; of sampling, the fastest rank's too (its sign is turned for that)."""
    meter.add_max("time/train", training)
    if made is not None:
        for phase, seconds in made.seconds.items():
            meter.add_max(f"time/{phase}", seconds)
        meter.add_max(FASTEST, -made.seconds["sampling"])


@dataclass(frozen=True)
class Weighed:
    """A train batch, with what each token of each of its samples, and each sample, weighs in the loss."""

    samples: Sequence[Sample]
    advantages: Sequence[Tensor]
    token_B: Tensor
    sequence_B: Tensor

    @staticmethod
    def of(run: Run, samples: Sequence[Sample]) -> Weighed:
        """Every rank has the whole train batch before its first micro-batch, and comes to the same numbers."""
        assert run.rollouts is not None
        cfg = run.rollouts.loss_cfg
        counts_B = torch.tensor([sample.counts for sample in samples])
        lengths_B = torch.tensor([len(sample.answer) for sample in samples])
        advantages = [torch.from_numpy(_there(sample.advantages)).double() for sample in samples]
        if cfg.whiten:
            advantages = whiten(advantages, counts_B)
        token_B = token_weight(cfg.normalize, lengths_B, counts_B, run.cfg.rollout.max_new_tokens)
        return Weighed(samples, advantages, token_B, sequence_weight(counts_B))


def micro_loss(run: Run, batch: Weighed, indices: Sequence[int], meter: Meter) -> tuple[Tensor, int]:
    """This rank's part of the train batch's loss, and the tokens that it held; metrics go to the meter."""
    rollouts = run.rollouts
    assert rollouts is not None
    with run.phases("data"):
        samples = [batch.samples[index] for index in indices]
        pack = run.pack([(sample.prompt.tokens, sample.answer) for sample in samples])
        shard = run.hold(pack)
    with run.phases("forward"):
        said = run.engine.forward(shard)
    tokens = laid_out(run, batch, indices, pack, shard, said)
    terms = rollouts.loss(tokens, rollouts.kl_coef)
    note(terms, tokens, meter)
    meter.add_total("tokens", shard.real_tokens, SHARDED)
    note_balance(meter, shard)
    # A rank without a sample, or without a token that counts, still runs its graph: no collective waits for it.
    everything = said.logps_t.sum() + (0.0 if said.values_t is None else said.values_t.sum())
    return terms.loss + 0.0 * everything, len(shard.tokens_t)


def laid_out(
    run: Run, batch: Weighed, indices: Sequence[int], pack: Pack, shard: Shard, said: TokenLogps
) -> PolicyTokens:
    """What is known of each token of the micro-batch, where this rank holds it."""
    samples = [batch.samples[index] for index in indices]
    dtype = said.logps_t.dtype
    index_t = shard.index_t.cpu()

    def spread(arrays: Sequence[np.ndarray]) -> Tensor:
        return on_pack(pack, arrays, dtype)[index_t].to(run.device)

    def field(name: str) -> Tensor | None:
        if samples and getattr(samples[0], name) is None:
            return None
        return spread([getattr(sample, name) for sample in samples])

    lengths = [len(sample.answer) for sample in samples]
    per_token = {
        "weight": [
            np.full(length, float(batch.token_B[index])) for index, length in zip(indices, lengths, strict=True)
        ],
        "trained": [np.full(len(sample.answer), float(sample.counts)) for sample in samples],
        "advantages": [batch.advantages[index].numpy() for index in indices],
    }
    laid = {name: spread(arrays) for name, arrays in per_token.items()}
    old_t, behaviour_t = field("old"), field("behaviour")
    assert old_t is not None
    assert behaviour_t is not None
    assert said.entropy_t is not None
    chosen = torch.tensor(indices, dtype=torch.int64)
    critic = said.values_t is not None
    assert run.rollouts is not None
    return PolicyTokens(
        logps_t=said.logps_t,
        old_t=old_t,
        behaviour_t=behaviour_t,
        reference_t=field("reference") if run.rollouts.loss.needs_reference else None,
        advantages_t=laid["advantages"],
        entropy_t=said.entropy_t,
        values_t=said.values_t,
        old_values_t=field("values") if critic else None,
        returns_t=field("returns") if critic else None,
        weight_t=laid["weight"],
        trained_t=laid["trained"],
        sequence_t=torch.where(shard.sequence_t < 0, shard.sequences, shard.sequence_t),
        weight_S=batch.sequence_B[chosen].to(run.device, dtype),
        length_S=torch.tensor(lengths, dtype=dtype, device=run.device),
        by_sequence=lambda values_t: ring_sum(sum_by_sequence(values_t, shard), run.world.ring),
    )


@torch.no_grad()
def note(terms: PolicyTerms, tokens: PolicyTokens, meter: Meter) -> None:
    """The parts of the loss as they are added up over the train batch, and means over its trained tokens."""
    whole = sum(terms.replicated.values(), start=torch.zeros_like(terms.loss))
    meter.add_total("loss", terms.loss - whole, SHARDED)
    meter.add_total("loss", whole, REPLICATED)
    for name, part in terms.weighted.items():
        meter.add_total(name, part, SHARDED)
    for name, part in terms.replicated.items():
        meter.add_total(name, part, REPLICATED)
    trained_t = tokens.trained_t
    for name, value_t in terms.means_t.items():
        meter.add_mean(name, (value_t * trained_t).sum(), trained_t.sum(), SHARDED)
    for name, value_t in terms.peaks_t.items():
        there_t = value_t[trained_t > 0]
        meter.add_max(name, float(there_t.max()) if len(there_t) else -math.inf)


def evaluate_policy(run: Run, step: int) -> dict[str, float]:
    """Answers to the held-out prompts."""
    assert run.rollouts is not None
    values = {f"eval/{name}": value for name, value in run.rollouts.evaluate().items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(f"step {step}: {', '.join(bad)} of the held-out prompts is not finite.")
    return values


def _there(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array
