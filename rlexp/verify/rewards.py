"""Rewards asked again, and answers read as texts, with their ends.

A rule is asked again about each answer; its own tests hold it to a second one (`tests/oracles/`). The user's function
is asked again in processes of its own. Reward models are transformers' own in float64, one sequence at a time.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlexp.base.errors import RewardError
from rlexp.config.schema import Config, HFModelConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.reward_terms import RewardTerm, reward_terms
from rlexp.config.schema.rollouts import ModelRewardConfig, Overlong, PythonRewardConfig, RuleRewardConfig
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.rollout.rewards.python import Worker
from rlexp.training.rollout.rewards.rule import rule_of
from rlexp.training.types import Example, Sample
from rlexp.verify.model import answer_score, load
from rlexp.verify.recording import ANSWER, Array, DrawnSample, TokenExample

ALONE = 32  # most answers about which a function is asked one by one


@dataclass
class Judges:
    """What judges the answers of a run, asked again."""

    cfg: Config
    tokenizer: Any
    device: torch.device
    exact: bool  # reward models whose precision is fp64 are computed again; else their scores are taken as given
    given: dict[str, str] = field(default_factory=dict)  # why a term is taken as the run says it
    notes: dict[str, str] = field(default_factory=dict)  # what else to say of a term that differs
    again: set[str] = field(default_factory=set)  # terms that were asked again

    def judged(self, drawn: Sequence[DrawnSample], texts: Sequence[str]) -> dict[str, Array]:
        """Judge answers by each term; where that cannot be done again, as the run says."""
        samples = [sample_of(each, text) for each, text in zip(drawn, texts, strict=True)]
        terms = {}
        for term in reward_terms(self.cfg.reward):
            by_run = np.array([sample.terms[term.name] for sample in drawn], dtype=float)
            scores = self._asked(term, samples, by_run)
            if scores is not None:
                self.again.add(term.name)
            terms[term.name] = by_run if scores is None else scores
        return terms

    def scored(self, terms: Mapping[str, Array], stopped: Sequence[bool]) -> Array:
        """Add the terms up, weighted, in the configuration's order; less the penalty for answers that have no end."""
        scores = np.zeros(len(stopped))
        for term in reward_terms(self.cfg.reward):
            scores += term.weight * terms[term.name]
        if self.cfg.rollout.overlong is Overlong.penalty:
            scores -= self.cfg.rollout.overlong_penalty * ~np.asarray(stopped, dtype=bool)
        return scores

    def _asked(self, term: RewardTerm, samples: Sequence[Sample], by_run: Array) -> Array | None:
        match term.cfg:
            case RuleRewardConfig() as cfg:
                rule = rule_of(cfg, term.key)
                return np.array([rule(sample.text, sample.example) for sample in samples], dtype=float)
            case PythonRewardConfig() as cfg:
                return self._of_function(term, cfg, samples, by_run)
            case ModelRewardConfig() as cfg if self.exact and cfg.precision is Precision.fp64:
                return self._of_model(term, cfg, samples)
        self.given[term.name] = "the run computes in less than float64"
        return None

    def _of_function(
        self, term: RewardTerm, cfg: PythonRewardConfig, samples: Sequence[Sample], by_run: Array
    ) -> Array | None:
        """Ask a function about all answers, twice in each of two processes: it may draw random numbers, or remember
        what it was asked. Where it is steady and the run says otherwise, ask about each answer alone."""
        try:
            one, *others = [scores for _ in range(2) for scores in asked(cfg, term.key, [samples, samples])]
        except RewardError as error:
            first = str(error).splitlines()[0].removeprefix(f"{term.key}.function={cfg.function}: ")
            self.given[term.name] = f"{cfg.function}: {textwrap.shorten(first, 300, placeholder=' …')}"
            return None
        changed = int((np.stack(others) != one).any(0).sum())
        if changed:
            why = f"answers otherwise when it is asked again ({changed} of {len(one)} answers)"
            self.given[term.name] = f"{cfg.function} {why}"
            return None
        differ = np.flatnonzero(one != by_run).tolist()
        if differ:
            places = [*dict.fromkeys([*differ, *range(len(one))])][:ALONE]
            try:
                alone = np.concatenate(asked(cfg, term.key, [[samples[place]] for place in places]))
            except RewardError as error:
                self.notes[term.name] = f"asked about each answer alone: {error}"
                return one
            if not np.array_equal(alone, one[places]):
                why = "says otherwise: what it says depends on what it is asked together with"
                self.notes[term.name] = f"asked about each answer alone, {cfg.function} {why}"
        return one

    @torch.no_grad()
    def _of_model(self, term: RewardTerm, cfg: ModelRewardConfig, samples: Sequence[Sample]) -> Array:
        """Score each answer by a reward model in float64, at its last token. What it is given is the product's: the
        policy's tokens, or those of the model's own tokenizer."""
        most = cfg.max_length or self.cfg.data.max_length
        path = str(Path(cfg.path).expanduser()) if cfg.path.startswith("~") else cfg.path
        whole = Config(model=HFModelConfig(path=path, trust_remote_code=cfg.trust_remote_code))
        model = load(replace(whole, data=replace(whole.data, max_length=most)), self.device, scores=True)
        product = RewardModel(cfg, term.key, self.tokenizer, self.cfg.data.max_length, self.device)
        scores = []
        for sample in samples:
            prompt, answer = (each.astype(np.int64) for each in product.encode(sample))
            example = TokenExample(prompt, {ANSWER: answer}, {}, sample.example.origin)
            scores.append(float(answer_score(model, example, ANSWER, self.device)))
        return np.array(scores, dtype=float)


def asked(cfg: PythonRewardConfig, key: str, calls: Sequence[Sequence[Sample]]) -> list[Array]:
    """Call a function in a new process, for some answers in each call."""
    worker = Worker(cfg, key)
    try:
        worker.begin()
        worker.await_import()
        return [np.array(worker.scores(samples), dtype=float) for samples in calls]
    finally:
        worker.kill()


def sample_of(drawn: DrawnSample, text: str) -> Sample:
    example = Example(drawn.index, drawn.prompt.astype(np.int32), origin=drawn.origin, text=drawn.asked,
                      expected=drawn.right)  # fmt: skip
    return Sample(place=drawn.place, example=example, number=drawn.place, answer=drawn.answer.astype(np.int32),
                  stopped=drawn.stopped, text=text, behaviour=drawn.behaviour)  # fmt: skip


# ---- texts and ends ----


def text_of(tokenizer: Any, answer: Sequence[int] | Array, stop: Sequence[str]) -> str:
    """Return an answer's text without special tokens, up to the first of the texts that end it."""
    text = _decoded(tokenizer, answer)
    return text if not stop else re.split("|".join(map(re.escape, stop)), text, maxsplit=1)[0]


def ended(tokenizer: Any, answer: Sequence[int] | Array, ends: Sequence[int], stop: Sequence[str]) -> bool:
    """Say whether an answer has ended by itself: by its last token, or by a text that its last tokens hold.

    A token is at least one byte of a text, so more tokens than a text has bytes hold all of it.
    """
    if len(answer) and int(answer[-1]) in ends:
        return True
    if not stop:
        return False
    text = _decoded(tokenizer, answer[-max(len(each.encode()) for each in stop) - 1 :])
    return any(each in text for each in stop)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer, by the model's description of how it generates and by the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return sorted(int(end) for end in ends - {None})


def _decoded(tokenizer: Any, answer: Sequence[int] | Array) -> str:
    return str(tokenizer.decode([int(token) for token in answer], skip_special_tokens=True))
