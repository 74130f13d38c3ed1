"""Rollouts in a rehearsal: the product's own drawing, scoring and credit, with the longest samples, each kind once.

Every prompt and every answer is as long as the configuration allows, and no answer ends early. What repeats is
rehearsed at its ends and counted as often as the run does it. Between two growths of the cache, all that a decoding
step counts rises by the same amount from step to step, and its peak is in the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlexp.config.checks.micro_batches import fullest_micro_batch, longest_lengths, scoring_at_once
from rlexp.config.schema import Config
from rlexp.config.schema.reward_terms import RewardTerm, reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, RewardConfig, RolloutConfig
from rlexp.config.vllm_memory import AT_ONCE, uses_vllm
from rlexp.preflight.rehearsal.log import CACHE, Log
from rlexp.preflight.rehearsal.mode import Counting, Rehearsing
from rlexp.training.dataset.sampler import Batch
from rlexp.training.model.decoding import Decoding, KeyValues
from rlexp.training.model.loading import random_reward_model
from rlexp.training.model.placing import Placing, put_all
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.rollout.choose import choose
from rlexp.training.rollout.deal import Draws, Request, Weights
from rlexp.training.rollout.experience import Host
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.rollout.sampling import Drawer, Drawn
from rlexp.training.rollout.scoring import RingRewardModel, Scorer, Sequences
from rlexp.training.rollout.vllm.chooser import ELEMENTS, Notes
from rlexp.training.rollout.vllm.weights import BUCKET
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.train.surroundings import UNPROBED, Unprobed, ring_reward_model
from rlexp.training.types import CreditedSample, Ids, Pack, Sample
from rlexp.training.world.groups import World


@dataclass(frozen=True)
class Wordless:
    """A tokenizer without words: every text is empty, and nothing ends an answer."""

    vocabulary: dict[str, int] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


class LongestSamples(Unprobed):
    """Rollouts of the longest samples. Real ranks draw and score every one, a rehearsal only those that differ.

    `vocabulary` is the size of the policy's.
    """

    def __init__(self, cfg: Config, mode: Counting, vocabulary: int) -> None:
        self.cfg, self.mode, self.vocabulary = cfg, mode, vocabulary
        self.judging: list[nn.Module] = []  # the reward models
        self.short = isinstance(mode, Rehearsing)

    def rewards(self, cfg: RewardConfig) -> Rewards:
        """Judge every sample alike by rules and functions of its text; reward models run."""
        terms = reward_terms(cfg)
        own = [Constant(term.name) for term in terms if not isinstance(term.cfg, ModelRewardConfig)]
        models = [term for term in terms if isinstance(term.cfg, ModelRewardConfig)]
        return Rewards(own, models, {term.name: term.weight for term in terms})

    def reward_model(self, run: TrainingRun, term: RewardTerm) -> RingRewardModel:
        return longest_reward_model(run, term, log=self.mode.log, made=self.judging)

    def drawer(self, **parts: Any) -> Draws:
        most = scored_at_once(self.cfg) if self.short else None
        if uses_vllm(self.cfg):
            return GivenDrawer(**parts, vocabulary=self.vocabulary, most=most)
        if most is None:
            return LoggedDrawer(**parts, mode=self.mode)
        return ShortDrawer(**parts, mode=self.mode, most=most)

    def scorer(self, **parts: Any) -> Scorer:
        if not self.short:
            return super().scorer(**parts)
        return ShortScorer(**parts, log=self.mode.log, samples=per_rank(self.cfg) * self.cfg.parallel.ring_size)

    def rollouts(self, **parts: Any) -> Rollouts:
        if not self.short:
            return super().rollouts(**parts)
        return AlikeRollouts(**parts, lengths=fullest_micro_batch(self.cfg))

    def host(self, world: World) -> Host:
        return Host(world.size, dist.group.WORLD if world.size > 1 else None) if self.short else super().host(world)


def per_rank(cfg: Config) -> int:
    """Return the samples that a rank draws for a rollout, on the rank that draws most."""
    return -(-cfg.rollout.batch_size * cfg.rollout.n_samples // cfg.parallel.world_size)


def drawn_at_once(cfg: Config) -> int:
    """Return the longest samples that a rank draws at once."""
    rollout, tokens = cfg.rollout, cfg.rollout.micro_batch_tokens
    most = min(rollout.micro_batch_size, per_rank(cfg))
    return most if tokens is None else max(1, min(most, tokens // cfg.data.max_length))


def scored_at_once(cfg: Config) -> int:
    """Return the longest samples that a ring scores at once."""
    return max(1, longest_lengths(cfg, scoring_at_once(cfg)).count(cfg.data.max_length))


def smaller(cfg: Config) -> Iterator[tuple[str, int]]:
    """Yield keys with values by which drawing or scoring a rollout needs less memory."""
    if not cfg.loss.draws:
        return
    rows = 1 if uses_vllm(cfg) else drawn_at_once(cfg)
    for fewer in sorted({rows // 2, 1}, reverse=True) if rows > 1 else ():
        yield "rollout.micro_batch_size", fewer
    if (scored := min(scored_at_once(cfg), per_rank(cfg) * cfg.parallel.ring_size)) > 1:
        yield "rollout.score_batch_size", scored // 2


# ---- drawing ----


class LoggedDrawer(Drawer):
    """Tells the log where each forward pass begins and ends, and which memory is the cache's."""

    def __init__(self, *, mode: Counting, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._mode, self._log = mode, mode.log

    def _next(self, batch: Decoding) -> Tensor:
        self._log.again()
        logits_BV = super()._next(batch)
        for held in batch.cache.tensors():
            self._log.label(self._mode.number_of(held), CACHE)
        self._log.again()
        return logits_BV


class ShortDrawer(LoggedDrawer):
    """Draws one micro-batch of each kind, and of a walk the places that are not like others.

    It returns no more samples than are scored at once.
    """

    def __init__(self, *, most: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._most = most
        self._alike = 1  # micro-batches like the one that is drawn

    def draw(self, micro_batches: Iterable[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        micro_batches = list(micro_batches)
        drawn = [sample for samples in super().draw(self._each_kind(micro_batches), rollout) for sample in samples]
        yield drawn[: self._most]

    def _each_kind(self, micro_batches: Sequence[Sequence[Request]]) -> Iterator[Sequence[Request]]:
        kinds = [(len(part), len({request.example.index for request in part})) for part in micro_batches]
        for kind, alike in Counter(kinds).items():
            self._alike = alike
            self._log.again(alike)
            yield micro_batches[kinds.index(kind)]
        self._log.again(1)

    def _any_goes_on(self, *, goes_on: bool) -> bool:
        super()._any_goes_on(goes_on=goes_on)
        return goes_on  # all ranks draw as much

    def _drawn(self, requests: Sequence[Request], rollout: int) -> Drawn:
        super()._drawn(requests, rollout)
        longest, rows = self._cfg.max_new_tokens, range(len(requests))
        return Drawn(requests, [[0] * longest for _ in rows], [[1.0] * longest for _ in rows], [False for _ in rows])

    def _walk(self, cache: KeyValues, places: range) -> Iterable[int]:
        """Take the ends of each stretch in which the cache has the same room, each counted as half of the stretch."""
        start, at = cache.length, 0
        while at < len(places):
            for number, times in self._stretch(cache, places, start, at):
                cache.length = start + places[number]
                self._log.again(times * self._alike)
                yield places[number]
                at = number + 1
        self._log.again(self._alike)

    def _stretch(self, cache: KeyValues, places: range, start: int, at: int) -> list[tuple[int, float]]:
        """Return the next steps to take, with the number of steps that each stands for.

        The first step, and one that makes the cache grow, stand for themselves. So does the last: it reads a shorter
        piece of the prompt, or nothing.
        """
        room = next((held.shape[3] for held in cache.tensors()), 0)
        until = min((room - start) // places.step, len(places) - 1) - 1
        if at == 0 or until <= at:
            return [(at, 1)]
        half = (until - at + 1) / 2
        return [(at, half), (until, half)]


class GivenDrawer:
    """Gives samples, as long as they may be. `most` is how many it returns, and `None` stands for all of them."""

    def __init__(
        self, *, vocabulary: int, most: int | None, cfg: RolloutConfig, device: torch.device, dtype: np.dtype[Any],
        **_: Any,
    ) -> None:  # fmt: skip
        self._vocabulary, self._most = vocabulary, most
        self._cfg, self._device, self._dtype = cfg, device, dtype
        self._notes = Notes(cfg.max_new_tokens, device)

    def renew(self, weights: Weights) -> None:
        """Hold weights until there are enough to be copied together."""
        held: list[Tensor] = []
        for _, weight in weights():
            held.append(weight)
            if sum(each.nbytes for each in held) >= BUCKET:
                held.clear()

    def draw(self, micro_batches: Iterable[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:  # noqa: ARG002
        requests = [request for part in micro_batches for request in part]
        self._choose(min(len(requests), AT_ONCE))
        yield [self._sample(request) for request in requests[: self._most]]

    def _choose(self, rows: int) -> None:
        """Choose a token for each row. The logits are vLLM's."""
        for row in range(rows):
            self._notes.line_of(row)
        size = max(1, min(rows, ELEMENTS // self._vocabulary))
        logits_BV = torch.empty(1, self._vocabulary, device=self._device).expand(size, self._vocabulary)
        choose(logits_BV, torch.zeros(size, dtype=torch.float64, device=self._device), self._cfg)
        self._notes.clear()

    def _sample(self, request: Request) -> Sample:
        answer = np.zeros(self._cfg.max_new_tokens, dtype=np.int32)
        behaviour = np.ones(len(answer), dtype=self._dtype)
        return Sample(**vars(request), answer=answer, behaviour=behaviour, stopped=False, text="")


# ---- scoring ----


@dataclass(frozen=True)
class ShortScorer(Scorer):
    """Scores two packs, and counts the second as often as the run has more. No two sequences begin alike."""

    log: Log
    samples: int  # of this ring

    def _packs(self, pairs: Sequences, *, together: bool = False) -> Iterator[tuple[Sequences, list[tuple[int, int]]]]:
        for number, pack in enumerate(super()._packs(pairs, together=together)):
            self.log.again(self._count(pairs) - 1 if number else 1)
            yield pack
        self.log.again(1)

    def _count(self, pairs: Sequences) -> int:
        """Return how many packs the run has."""
        return -(-self.samples // len(self._prompts(pairs)))

    def _prompts(self, pairs: Sequences) -> list[int]:
        """Return the lengths of the prompts of the longest samples that fill a pack."""
        (prompt, answer), room = pairs[0], self.dealer.room
        if room.tokens is None:
            return [len(prompt)] * (room.units or 1)
        whole, rest = divmod(room.tokens, len(prompt) + len(answer))
        return [len(prompt)] * max(1, whole) + [rest - len(answer)] * (whole > 0 and rest > len(answer))

    def _whole(self, pairs: Sequences) -> tuple[Sequences, int]:
        packs, prompts = self._count(pairs), self._prompts(pairs)
        each = min(len(prompts), self.samples) if self.dealer.room.tokens is not None else -(-self.samples // packs)
        lengths = [prompts[number % len(prompts)] for number in range(max(len(pairs), min(packs, 2) * each))]
        return [(np.full(length, number, dtype=np.int32), pairs[0][1]) for number, length in enumerate(lengths)], 0


class AlikeRollouts(Rollouts):
    def __init__(self, *, lengths: Sequence[int], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lengths = lengths

    def samples(self, batch: Batch) -> list[CreditedSample]:
        """Return a whole train batch, whose samples begin differently, and fill micro-batches."""
        lengths = [self._lengths[number % len(self._lengths)] for number in range(len(batch.indices))]
        return [_unlike(self.own_samples[at % len(self.own_samples)], at, each) for at, each in enumerate(lengths)]


def _unlike(sample: CreditedSample, number: int, length: int) -> CreditedSample:
    """Return a sample of so many tokens, or of an answer alone with one, whose prompt no other has."""
    tokens = np.full(max(1, length - len(sample.answer)), number, dtype=np.int32)
    return dataclasses.replace(sample, example=dataclasses.replace(sample.example, prompt=tokens))


# ---- rewards ----


@dataclass(frozen=True)
class Constant:
    name: str
    terms: dict[int, float] = field(default_factory=dict)

    def submit(self, samples: Sequence[Sample]) -> None:
        self.terms.update({sample.place: 1.0 for sample in samples})

    def collect(self) -> dict[int, float]:
        return self.terms

    def close(self) -> None: ...


def longest_reward_model(run: TrainingRun, term: RewardTerm, *, log: Log, made: list[nn.Module]) -> RingRewardModel:
    """Build a reward model from its configuration alone, for sequences as long as it takes."""
    assert isinstance(term.cfg, ModelRewardConfig)
    longest = term.cfg.max_length or run.cfg.data.max_length

    def load(cfg: ModelRewardConfig, key: str, max_length: int, placing: Placing) -> Any:
        model = random_reward_model(cfg, key, max_length)
        put_all(model, placing)
        made.append(model)
        return model

    def encode(sample: Sample) -> tuple[Ids, Ids]:
        answer = min(len(sample.answer), longest - 1)
        return np.zeros(longest - answer, dtype=np.int32), np.zeros(answer, dtype=np.int32)

    def score(pack: Pack) -> Tensor:
        log.again()
        scores_S = model.score(pack)
        log.again()
        return scores_S

    make = functools.partial(RewardModel, load=load, load_tokenizer=lambda *_: Wordless({"another": 0}))
    model = ring_reward_model(run, term, make=make, probing=UNPROBED.probe)
    return dataclasses.replace(model, encode=encode, score=score)
