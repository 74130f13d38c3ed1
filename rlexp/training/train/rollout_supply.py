"""Get a run's samples, rollout by rollout: draw, judge and score them, give them advantages, and cut train batches.

A rollout serves `rollout.epochs × rollout.minibatches` optimizer steps. A step's samples follow from (seed, rollout,
epoch), and the tokens drawn from (seed, rollout, prompt, sample, position): nothing here knows the layout.

A token's gap is its log-probability before the first step on the rollout, by the scoring pass, less the one with which
it was drawn. In a colocated run it is rounding; in a pipelined one it is also what training moved since.

Shape letters: N samples of a rollout, L tokens of an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import CheckpointError, DrawError
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.config.schema.rollouts import Overlong, RolloutConfig, RolloutEngine
from rlexp.run_files.rollouts_jsonl import digests
from rlexp.training.algos.policy import KLController, estimate
from rlexp.training.algos.policy_loss import Outcomes, PolicyLoss
from rlexp.training.dataset.sampler import Batch, Sampler
from rlexp.training.rollout import saved
from rlexp.training.rollout.experience import Host, Table, fetch, table_of
from rlexp.training.rollout.rewards.weighted import Judged, Rewards
from rlexp.training.rollout.scoring import Columns, Scorer, Scores
from rlexp.training.rollout.sources import Source
from rlexp.training.sinks.base import RolloutFacts, Shown
from rlexp.training.train.examples import Examples
from rlexp.training.train.parts import TrainingRun
from rlexp.training.types import CreditedSample, Sample, ScoredSample

HELD_OUT = 1 << 40  # the rollout number under which held-out prompts are answered
NOW, NEXT = "now", "next"  # a rollout that is trained on, and one drawn ahead
ALIKE = 1e-9  # scores of a group this close, relatively, count as equal: a model's scores may differ by rounding
# A token is beyond this gap if its importance weight leaves e^±0.2 (0.82 to 1.22). That is about as far as the usual
# clipping (loss.clip_low and loss.clip_high: 0.2) lets all steps on a rollout move its probability.
BEYOND = 0.2
# On average, and with the weights that are trained. Rounding to bfloat16 made 0.045 of it in SmolLM2-135M.
ANOTHER_MODEL = 0.5
COLUMNS = ("gap_sum", "gap_max", "gap_beyond", "gap_whole", "gap_weights", "gap_squares")


@dataclass(frozen=True)
class Made:
    """A new rollout's values for the row of its first step, and when it was made."""

    values: dict[str, float]
    seconds: dict[str, float]  # this rank's, by phase
    spans: dict[str, list[tuple[float, float]]]  # by the clock: when it was drawn, taken in and scored


def samples_of_step(cfg: RolloutConfig, seed: int, train_batch: int, step: int) -> Batch:
    """Return the samples of an optimizer step, by their places in its rollout."""
    number, inner = divmod(step - 1, cfg.epochs * cfg.minibatches)
    epoch, minibatch = divmod(inner, cfg.minibatches)
    order = np.random.default_rng([seed, number, epoch]).permutation(cfg.batch_size * cfg.n_samples)
    places = order[minibatch * train_batch : (minibatch + 1) * train_batch]
    return Batch(step, epoch, tuple(int(place) for place in places))


@dataclass
class Rollouts:
    """The state of a run's rollouts on this rank."""

    run: TrainingRun
    loss_cfg: PolicyLossConfig
    loss: PolicyLoss
    examples: Examples
    sampler: Sampler
    source: Source
    rewards: Rewards
    scorer: Scorer
    host: Host
    number: int = -1  # the rollout at hand
    own_samples: list[CreditedSample] = field(default_factory=list)  # this rank's samples
    kl_coef: float = 0.0  # the coefficient the rollout was made with
    made: Made | None = None  # the last rollout, until `facts_of` has told of it

    def __post_init__(self) -> None:
        self.cfg, self.world, self.phases = self.run.cfg.rollout, self.run.world, self.run.phases
        self.size, self.steps_each = self.cfg.batch_size * self.cfg.n_samples, self.cfg.epochs * self.cfg.minibatches
        self.controller = KLController(self.loss_cfg.beta, self.loss_cfg.kl_target, self.loss_cfg.kl_horizon)

    def of_step(self, step: int) -> int:
        return (step - 1) // self.steps_each

    def samples(self, batch: Batch) -> list[CreditedSample]:
        """Return a whole train batch on every rank. A collective call."""
        return fetch(self.own_samples, batch.indices, self.host)

    def ensure(self, step: int) -> Made | None:
        """Get the rollout that a step belongs to; return what is said of it if it is new. A collective call."""
        number = self.of_step(step)
        if number == self.number:
            return None
        began = time.monotonic()
        prompts = [self.examples.train[index] for index in self.sampler.batch(number + 1).indices]
        with self.phases("rollout"):
            samples = self.source.draw(number, prompts, self.cfg.n_samples, self.rewards)
            self.host.meet()
        drawn = time.monotonic()
        with self.phases("score"):
            scored = self._collect(samples, *self.scorer.score(samples))
            self.kl_coef, self.number = self.controller.beta, number
            table = self._table(scored, self.size, scored=True)
            self.own_samples = self._give_credit(scored, table)
        values = self._values(table)
        self._refuse(values)
        self.controller.update(values["objective/kl"], self.size)
        seconds = {"rollout": drawn - began, "score": time.monotonic() - drawn}
        seconds |= {"sampling": self.source.seconds, "waited": self.source.waited}
        now = time.time()
        began_to_score = now - (time.monotonic() - drawn)
        spans = {"sampling": self.source.spans, "taking": [(now - (time.monotonic() - began), began_to_score)],
                 "scoring": [(began_to_score, now)]}  # fmt: skip
        self.made = Made(values, seconds, spans)
        return self.made

    def _refuse(self, values: dict[str, float]) -> None:
        if self.cfg.engine is RolloutEngine.vllm and self.source.staleness == 0:
            refuse_another_model(values, self.number + 1)

    def _collect(self, samples: Sequence[Sample], columns: Columns, by_models: Scores) -> list[ScoredSample]:
        judged = self.rewards.judged(samples, by_models)
        return [self._scored(*each) for each in zip(samples, judged, columns, strict=True)]

    def _scored(self, sample: Sample, judged: Judged, columns: Mapping[str, Any]) -> ScoredSample:
        less = self.cfg.overlong_penalty if self.cfg.overlong is Overlong.penalty and not sample.stopped else 0.0
        counts = sample.stopped or self.cfg.overlong is not Overlong.mask
        score = judged.score - less
        return ScoredSample(**vars(sample), **columns, score=score, terms=judged.terms, counts=counts)

    def _table(self, samples: Sequence[ScoredSample], total: int, *, scored: bool) -> Table:
        def row(sample: ScoredSample) -> dict[str, float]:
            numbers = {"score": sample.score, "length": float(len(sample.answer)), "stopped": float(sample.stopped)}
            numbers |= {f"reward/{name}": sample.terms[name] for name in self.rewards.weights}
            if scored:
                assert sample.old is not None
                d_L = self._log_ratio(sample)
                numbers |= {
                    "surprise": -float(sample.old.sum(dtype=np.float64)),
                    "kl": float(d_L.sum()),
                    "kl_estimate": float(estimate(self.loss_cfg.kl, d_L).sum()),
                    **gap_of(sample),
                }
            return numbers

        names = ["score", "length", "stopped", *(f"reward/{name}" for name in self.rewards.weights)]
        names += ["surprise", "kl", "kl_estimate", *COLUMNS] if scored else []
        return table_of(samples, total, self.host, row, names)

    def _log_ratio(self, sample: ScoredSample) -> Tensor:
        """Return log(policy / reference) of each token, in float64; zeros without a reference."""
        assert sample.old is not None
        old_L = torch.from_numpy(sample.old).double()
        if sample.reference is None:
            return torch.zeros_like(old_L)
        return old_L - torch.from_numpy(sample.reference).double()

    def _give_credit(self, samples: Sequence[ScoredSample], table: Table) -> list[CreditedSample]:
        """Give this rank's samples their advantages by token, from the outcomes of all samples."""
        group_N = torch.arange(self.size) // self.cfg.n_samples
        credit_N = self.loss.credit(Outcomes(table["score"], table["kl_estimate"], group_N), self.kl_coef)
        without_signal = without_signal_of(table["score"], self.cfg.n_samples)
        credited = []
        for sample in samples:
            values_L = None if sample.values is None else torch.from_numpy(sample.values).double()
            kl_L = estimate(self.loss_cfg.kl, self._log_ratio(sample))
            spread = self.loss.spread(float(credit_N[sample.place]), kl_L, values_L, self.kl_coef)
            counts = sample.counts and not (self.loss_cfg.filter and bool(without_signal[sample.place]))
            returns = None if spread.returns_L is None else spread.returns_L.numpy().astype(self.scorer.dtype)
            credited.append(CreditedSample(
                **vars(sample) | {"counts": counts}, advantages=spread.advantages_L.numpy().astype(self.scorer.dtype),
                returns=returns,
            ))  # fmt: skip
        return credited

    def _values(self, table: Table) -> dict[str, float]:
        """Return the rollout's values under TRL's names, where it has one: means over samples of sums over tokens."""
        mean = {name: float(column.mean()) for name, column in table.items()}
        non_score = -self.kl_coef * mean["kl_estimate"]
        values = {
            "objective/scores": mean["score"],
            "objective/scores_std": float(table["score"].std(correction=0)),
            "objective/kl": mean["kl"],
            "objective/entropy": mean["surprise"],
            "objective/non_score_reward": non_score,
            "objective/rlhf_reward": mean["score"] + non_score,
            "objective/kl_coef": self.kl_coef,
            "response/length": mean["length"],
            "response/length_max": float(table["length"].max()),
            "response/stopped": mean["stopped"],
            "rollout/staleness": self.source.staleness,
            "rollout/without_signal": float(without_signal_of(table["score"], self.cfg.n_samples).double().mean()),
        }
        values |= gap_values(table)
        values |= {name: value for name, value in mean.items() if name.startswith("reward/")}
        if self.loss.wanted.values is not None:
            values |= {"val/explained_variance": self._explained_variance()}
        return values

    def _explained_variance(self) -> float:
        """Return 1 − Var(returns − values) / Var(returns) over the rollout's tokens; 0 where all returns are equal."""

        def sums(sample: CreditedSample) -> dict[str, float]:
            assert sample.returns is not None
            assert sample.values is not None
            returns = sample.returns.astype(np.float64)
            error = returns - sample.values
            return {"n": float(len(returns)), "r": returns.sum(), "rr": (returns**2).sum(), "e": error.sum(),
                    "ee": (error**2).sum()}  # fmt: skip

        table = table_of(self.own_samples, self.size, self.host, sums, ["n", "r", "rr", "e", "ee"])
        n, r, rr, e, ee = (float(column.sum()) for column in table.values())
        spread = rr - r * r / n
        return 1 - (ee - e * e / n) / spread if spread > 1e-9 * rr else 0.0

    def facts_of(self, step: int) -> RolloutFacts | None:
        """Return on rank 0, once, what the sinks are told of a rollout. A collective call."""
        made, self.made = self.made, None
        if made is None:
            return None
        due = self.cfg.show_every and self.number % self.cfg.show_every == 0
        stride = max(1, self.size // self.cfg.show) if self.cfg.show else self.size
        wanted = range(0, stride * self.cfg.show, stride) if due else range(0)
        own_facts = [(s.place, digests(s.answer), shown(s) if s.place in wanted else None) for s in self.own_samples]
        parts = self.host.gathered(own_facts)
        if self.world.rank != 0:
            return None
        known = sorted((each for part in parts for each in part), key=lambda each: each[0])
        indices = self.sampler.batch(self.number + 1).indices
        table = [each[2] for each in known if each[2] is not None]
        digested = [each[1] for each in known]
        return RolloutFacts(self.number + 1, step, self.cfg.n_samples, indices, digested, table, made.spans)

    def evaluate(self) -> dict[str, float]:
        """Answer each held-out prompt once, with the same random numbers every time. A collective call."""
        with self.phases("eval"):
            samples = self.source.draw(HELD_OUT, self.examples.held_out, 1, self.rewards)
            self.host.meet()
            scored = self._collect(samples, [{} for _ in samples], self.scorer.score_rewards(samples))
            table = self._table(scored, len(self.examples.held_out), scored=False)
        mean = {name: float(column.mean()) for name, column in table.items()}
        renamed = {"score": "objective/scores", "length": "response/length", "stopped": "response/stopped"}
        return {renamed.get(name, name): value for name, value in mean.items()}

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint needs to know: small, and the same on every rank."""
        sizes = {"size": self.size, "steps_each": self.steps_each}
        return {"number": self.number, "kl_coef": self.kl_coef, "beta": self.controller.beta, **sizes}

    def unfinished(self, step: int) -> dict[str, list[Sample]]:
        """Return this rank's samples that steps after `step` will take, by the name of their file in a checkpoint."""
        waiting = self.source.waiting()
        now: list[Sample] = list(self.own_samples)
        return ({} if waiting is None else {NEXT: waiting}) | ({NOW: now} if step % self.steps_each else {})

    def restore(self, folder: Path, position: dict[str, Any], step: int) -> None:
        rank, ranks = self.world.rank, self.world.size
        was, now = (position["size"], position["steps_each"]), (self.size, self.steps_each)
        if was != now and any(folder.glob(saved.PATTERN)):
            raise CheckpointError(
                f"rollout: {folder} has samples of a rollout of {was[0]} for {was[1]} optimizer steps, and a rollout "
                f"is now of {now[0]} for {now[1]}. Give rollout.batch_size, n_samples and epochs, and train.batch_size "
                f"their old values; resume.force cannot change them within a rollout."
            )
        self.controller.beta = position["beta"]
        if step % self.steps_each:
            self.number, self.kl_coef = position["number"], position["kl_coef"]
            self.own_samples = saved.credited(folder, NOW, self.examples.train, rank, ranks)
        if any(folder.glob(saved.PATTERN.replace("*", f"{NEXT}-*"))):
            waiting = saved.drawn(folder, NEXT, self.examples.train, rank, ranks)
            self.source.restore(position["number"] + 1, waiting)


def shown(sample: ScoredSample) -> Shown:
    length = len(sample.answer)
    return Shown(sample.example.text, sample.text, sample.score, sample.terms, length, sample.stopped)


def without_signal_of(scores_N: Tensor, n_samples: int) -> Tensor:
    """Return (N,): whether all answers to the sample's prompt scored the same; False for a single answer."""
    if n_samples == 1:
        return torch.zeros_like(scores_N, dtype=torch.bool)
    groups = scores_N.view(-1, n_samples)
    apart = groups.amax(1) - groups.amin(1)
    alike = apart <= ALIKE * groups.abs().amax(1)
    return alike.repeat_interleave(n_samples)


# ---- how far the model that generates lies from the model that is trained ----


def gap_of(sample: ScoredSample) -> dict[str, float]:
    """Return a sample's row in the rollout's table. Sums of weights are logarithms: a weight may be huge."""
    assert sample.old is not None
    gap_L = sample.old.astype(np.float64) - sample.behaviour
    size_L = np.abs(gap_L)
    weights = [torch.from_numpy(each_L).logsumexp(0) for each_L in (gap_L, 2 * gap_L)]
    sums = (size_L.sum(), size_L.max(), (size_L > BEYOND).sum(), gap_L.sum(), *weights)
    return {name: float(value) for name, value in zip(COLUMNS, sums, strict=True)}


def gap_values(table: Table) -> dict[str, float]:
    """Return the rollout's values: under TRL's names, where it has one, and over all tokens of all samples."""
    tokens = float(table["length"].sum())
    whole_N = table["gap_whole"]
    return {
        "sampling/sampling_logp_difference/mean": float(table["gap_sum"].sum()) / tokens,
        "sampling/sampling_logp_difference/max": float(table["gap_max"].max()),
        "rollout/gap_beyond": float(table["gap_beyond"].sum()) / tokens,
        "rollout/effective_tokens": _effective(table["gap_weights"], table["gap_squares"], tokens),
        "rollout/effective_answers": _effective(whole_N, 2 * whole_N, len(whole_N)),
    }


def refuse_another_model(values: dict[str, float], rollout: int) -> None:
    """Refuse the samples of a rollout if they were drawn from something else than the policy: training on them would
    be training on noise."""
    mean = values["sampling/sampling_logp_difference/mean"]
    if not mean <= ANOTHER_MODEL:
        raise DrawError(
            f"rollout {rollout}: the log-probabilities of the tokens of vLLM differ by {mean:.2g} on average from "
            f"those of the model that is trained, with the same weights, and rounding does not make {ANOTHER_MODEL}. "
            f"vLLM computes something else. `python -m rlexp.verify` with the same words tells possible causes apart. "
            f"Use rollout.engine=native."
        )


def _effective(weights_N: Tensor, squares_N: Tensor, count: float) -> float:
    """Return (Σw)² / (n Σw²), the share of n weights that as many equal ones would have."""
    return min(1.0, math.exp(2 * float(weights_N.logsumexp(0)) - float(squares_N.logsumexp(0))) / count)
