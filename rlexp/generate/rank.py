"""A rank that generates: whole weights or its pieces, no optimizer, and its share of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlexp.base.errors import DataError
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.rope import positions_in
from rlexp.config.schema import Config, NoAdapterConfig
from rlexp.config.schema.row_kinds import Kind
from rlexp.generate.job import Answered, Beside, GenerateJob, Reply
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.checkpoint.restore import restore
from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.loading import end_with_template, load_config, load_tokenizer
from rlexp.training.model.policy import DTYPES
from rlexp.training.model.probe import probe_decoding
from rlexp.training.model.rope import MOVING
from rlexp.training.rollout.deal import deal, micro_batches
from rlexp.training.sinks.console import say
from rlexp.training.train.build import build_frozen, build_policy, models_of, placing_for
from rlexp.training.train.build_rollouts import build_drawer
from rlexp.training.train.examples import Examples, read_examples, refuse_foreign_tokens
from rlexp.training.train.surroundings import HERE
from rlexp.training.types import Example, Sample, Wanted
from rlexp.training.world.groups import World, build_world
from rlexp.training.world.objects import gather_objects


def generate_rank(spec: RankSpec, job: GenerateJob, nothing: str) -> list[Answered]:
    """Return the answers to all prompts. `nothing` is a folder without runs."""
    join(spec, job.cfg.launch)
    torch.use_deterministic_algorithms(job.cfg.launch.deterministic)
    here = Here(build_world(job.cfg.parallel.ring_size), HERE.device(job.cfg))
    roomy = with_room(job.cfg, job.room)
    tokenizer = load_tokenizer(roomy.model)
    examples = examples_of(job, roomy, tokenizer, here.world)
    cfg = within_positions(roomy, job.cfg.data.max_length)
    prompts = prompts_of(job, cfg, examples, tokenizer)
    beside: list[list[Reply]] = [[] for _ in prompts]
    if job.beside is Beside.reference:
        models_of(cfg, load_config(cfg.model, cfg.data.max_length), Wanted(reference=True), HERE)  # or refuse it
        alone = replace(cfg, model=model_of_reference(cfg), adapter=NoAdapterConfig())
        beside = here.generated(alone, here.built(alone, examples), prompts)
    engine = here.built(cfg, examples)
    if job.beside is Beside.start:
        adapter = engine.policy.adapter if job.folder is None else None  # a run's weights are loaded as at its start
        with nullcontext() if adapter is None else adapter.starting():
            beside = here.generated(cfg, engine, prompts)
    if job.folder is not None:
        restored = restore(str(job.folder.resolve()), Path(nothing), engine, here.world, say)
        assert restored is not None, "a folder always has a checkpoint, or raises"
    answers = here.generated(cfg, engine, prompts)
    leave_world()
    return [Answered(prompt.origin, prompt.text, *each) for prompt, *each in zip(prompts, answers, beside, strict=True)]


@dataclass(frozen=True)
class Here:
    """Where a rank computes."""

    world: World
    device: torch.device

    def built(self, cfg: Config, examples: Examples) -> Frozen:
        """Load a configuration's starting weights. A collective call where they are in pieces."""
        config = load_config(cfg.model, cfg.data.max_length)
        probe_decoding(cfg.model, config, cfg.data.max_length, self.device)
        placing = placing_for(cfg, self.device, self.world, frozen=True)
        wanted = Wanted(temperature=cfg.rollout.temperature)
        policy = build_policy(cfg, config, self.device, wanted, placing)
        end_with_template(policy.model, load_tokenizer(cfg.model), cfg.model)
        refuse_foreign_tokens(examples, policy.model.get_input_embeddings().num_embeddings)
        return build_frozen(cfg.engine, policy, self.world, DTYPES[cfg.train.precision])

    def generated(self, cfg: Config, engine: Frozen, prompts: Sequence[Example]) -> list[list[Reply]]:
        """Return the answers to each prompt, on every rank. A collective call."""
        rollout, world = cfg.rollout, self.world
        in_step = engine.sharded and world.size > 1
        tokenizer = load_tokenizer(cfg.model)
        drawer = build_drawer(cfg, engine.decode, engine.policy.model, tokenizer, self.device, in_step=in_step)
        requests = deal(prompts, rollout.n_samples, world.size)[world.rank]
        parts = micro_batches(requests, rollout.micro_batch_size, rollout.micro_batch_tokens, rollout.max_new_tokens)
        drawn: list[Sample] = [sample for samples in drawer.draw(parts, 0) for sample in samples]
        answers = [(sample.place, Reply(sample.text, sample.answer.tolist(), sample.stopped)) for sample in drawn]
        replies = dict(each for part in gather_objects(answers, world.size) for each in part)
        return [
            [replies[place * rollout.n_samples + number] for number in range(rollout.n_samples)]
            for place in range(len(prompts))
        ]


def with_room(cfg: Config, room: int) -> Config:
    """Let data.max_length hold an answer beside a prompt that is as long as training allowed, with so much room."""
    lacking = max(0, cfg.rollout.max_new_tokens - room)
    return replace(cfg, data=replace(cfg.data, max_length=cfg.data.max_length + lacking))


def within_positions(cfg: Config, trained: int) -> Config:
    """Bound data.max_length by the positions that the model is made for. Positions that depend on data.max_length stay
    as training had them."""
    positions = positions_in(load_config(cfg.model, cfg.data.max_length).to_dict())
    most = trained if positions.kind in MOVING else positions.reach or cfg.data.max_length
    return replace(cfg, data=replace(cfg.data, max_length=min(cfg.data.max_length, most)))


def examples_of(job: GenerateJob, roomy: Config, tokenizer: Any, world: World) -> Examples:
    """Read the prompts that were given, or held-out rows as training has them. A collective call."""
    if job.given:
        return read_examples(roomy, tokenizer, world, trains=False, kind=Kind.prompts)
    rollout = replace(job.cfg.rollout, max_new_tokens=job.room or job.cfg.rollout.max_new_tokens)
    return read_examples(replace(job.cfg, rollout=rollout), tokenizer, world, trains=False)


def prompts_of(job: GenerateJob, cfg: Config, examples: Examples, tokenizer: Any) -> list[Example]:
    """Return the prompts to answer, and refuse one that leaves no room for an answer."""
    step = 2 if job.cfg.data.unpair else 1  # both halves of a pair have its prompt
    rows = examples.held_out[::step][: job.rows]
    prompts = [prompt_of(each, place, tokenizer) for place, each in enumerate(rows)]
    new, most = cfg.rollout.max_new_tokens, cfg.data.max_length
    for prompt in prompts:
        left = most - len(prompt.prompt)
        if left < new:
            remedy = f"Use rollout.max_new_tokens={left}, or" if left > 0 else "Give"
            raise DataError(
                f"{prompt.origin}: the prompt has {len(prompt.prompt)} tokens, and the model has {most} positions for "
                f"it and an answer of rollout.max_new_tokens={new}. {remedy} a shorter prompt."
            )
    return prompts


def prompt_of(example: Example, place: int, tokenizer: Any) -> Example:
    if not example.answers:
        return replace(example, index=place)
    text = tokenizer.decode(example.prompt, skip_special_tokens=True)
    return Example(place, example.prompt, origin=example.origin, text=text)
