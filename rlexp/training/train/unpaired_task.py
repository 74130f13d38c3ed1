"""Train on single answers, each labelled good or bad.

A loss may ask for answers to other prompts, by which it estimates how far the policy has moved. The order of the train
batch pairs them, so no layout changes them (`partners_of`). A pass without gradient runs over them before the first
micro-batch.

Shape letter: B examples of the train batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlexp.config.checks.unpaired import ALONE
from rlexp.config.schema import Config
from rlexp.config.schema.losses import KTOConfig, UnpairedConfig
from rlexp.training.algos.base import Sides, Values
from rlexp.training.algos.log_ratios import log_ratio
from rlexp.training.dataset.sampler import Batch
from rlexp.training.dataset.tokens import fitted
from rlexp.training.train.examples import Examples, sampler_of
from rlexp.training.train.offline_task import HeldExamples, OfflineStep, OfflineTask
from rlexp.training.train.whole_batch import gathered
from rlexp.training.types import Answered, Completion

IDEAL = (1.0, 4 / 3)  # weight of all good answers over that of all bad ones, by the paper of KTO (section 4.2)
NEAR = 1.1  # a factor within which they are near enough


class UnpairedTask(OfflineTask):
    @classmethod
    def unfit(cls, cfg: Config, examples: Examples) -> str | None:
        alone = _alone(cfg, examples) if cls.loss_of(cfg).wanted.mismatched else None
        return _alike(cfg, examples.labels) or alone

    def step_of(self, batch: Batch, examples: Sequence[Answered], *, held_out: bool = False) -> OfflineStep:
        return UnpairedStep(self, batch, examples, held_out=held_out)

    def remarks(self) -> list[str]:
        loss = self.run.cfg.loss
        return unbalanced(loss, self.examples.labels) if isinstance(loss, KTOConfig) else []


class UnpairedStep(OfflineStep):
    mismatched_B: Tensor | None = None

    @cached_property
    def partners(self) -> list[int]:
        return partners_of([self.example(place).prompt.tobytes() for place in range(self.count)])

    def prepare(self) -> None:
        if self.task.wanted.mismatched:
            if not self.held_out:
                self.choose_counted()
            self.mismatched_B = self.log_ratios_of_others()
        super().prepare()

    @torch.no_grad()
    def log_ratios_of_others(self) -> Tensor:
        """Return the log-ratio of an answer to each prompt that is another's, (B,). A collective call."""
        run, found = self.task.run, []
        with run.phases("collect"), self.task.passing("mismatched"):
            for places in self.deal(self.mismatched).packs[run.world.replica]:
                values, _ = self.values(self.task.shard([*map(self.mismatched, places)]))
                found.append((places, values))
            return log_ratio(gathered(found, self.count, run.world), "answer")

    def mismatched(self, place: int) -> Completion:
        """Return the prompt at a place of the batch, with the answer of its partner."""
        own, other = self.example(place), self.example(self.partners[place])
        run, (answer, mask) = self.task.run, other.answers[0]
        prompt, (answer,), (mask,) = fitted(
            own.prompt, (answer,), (mask,), run.cfg.data.max_length, run.tokenizer.bos_token_id
        )
        return Completion(own.index, prompt, answer, f"{own.origin} with the answer of {other.origin}", mask, own.label)

    def values(self, held: HeldExamples, reference: Sides | None = None) -> tuple[Values, Any]:
        values, tokens = super().values(held, reference)
        return replace(values, mismatched_B=self.mismatched_B), tokens


def partners_of(prompts: Sequence[Hashable]) -> list[int]:
    """Return, for each place of a batch, the place of the answer that its prompt is given.

    It is the place before, round the batch. Where k places in a row have one prompt, it is k places before: so two
    answers to a prompt, a good and a bad one, are given those of the prompt before, each its own. If that has the same
    prompt again, the nearest place before it with another one; if all have one prompt, just the place before.
    """
    count = len(prompts)
    if len(set(prompts)) <= 1:
        return [(place - 1) % count for place in range(count)]
    turn = next(place for place in range(count) if prompts[place] != prompts[place - 1])  # a row of equal ones begins
    begins = [0] * count  # for each place, where its row of equal ones begins
    sizes = Counter[int]()
    for place in range(turn, turn + count):
        here, before = place % count, (place - 1) % count
        begins[here] = begins[before] if prompts[here] == prompts[before] else here
        sizes[begins[here]] += 1
    partners = []
    for place, begin in enumerate(begins):
        other = (place - sizes[begin]) % count
        same = prompts[other] == prompts[place]
        partners.append((begins[other] - 1) % count if same else other)
    return partners


# ---- what does not fit ----


def _alike(cfg: Config, labels: tuple[int, int]) -> str | None:
    if all(labels) or not any(labels):
        return None
    only, other = ("true", "false") if labels[0] else ("false", "true")
    return (
        f"data={cfg.data.name}: all {sum(labels)} rows have `label` {only}, and loss={cfg.loss.name} compares good "
        f"answers with bad ones. Give some rows whose `label` is {other}; or, to learn answers as they are, loss=sft."
    )


def _alone(cfg: Config, examples: Examples) -> str | None:
    """Say if the last batch, or the held-out data, has a single answer. The size of all other batches is checked with
    the configuration."""
    size, taken = cfg.train.batch_size, sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture).taken
    why = f"loss={cfg.loss.name} {ALONE}"
    if taken % size == 1 and not cfg.data.drop_last:
        return (
            f"data.drop_last=false: {taken} answers in batches of {size} leave a last batch of 1, and {why}. Use "
            f"data.drop_last=true, or another train.batch_size."
        )
    if len(examples.held_out) == 1:
        return f"the held-out data: has 1 answer, and {why}. Hold out 2 or more."
    return None


def unbalanced(loss: UnpairedConfig, labels: tuple[int, int]) -> list[str]:
    """Say if the labels' weights are far from what the paper of KTO advises."""
    good, bad = labels
    if not good or not bad:
        return []
    ratio = loss.desirable_weight * good / (loss.undesirable_weight * bad)
    least, most = IDEAL
    if least / NEAR <= ratio <= most * NEAR:
        return []
    low, high = (bound * loss.undesirable_weight * bad / good for bound in IDEAL)
    return [
        f"warning: {good:,} good answers weigh {ratio:.2g} times as much as {bad:,} bad ones, and KTO's authors advise "
        f"1 to 1.33 times. Consider loss.desirable_weight={low:.3g} to {high:.3g}"
    ]
