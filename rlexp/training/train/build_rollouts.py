"""Build what draws the samples of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlexp.base.errors import ModelError
from rlexp.config.schema import Config
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.training.engine.base import Engine
from rlexp.training.model.export import has_other_names, save_description
from rlexp.training.model.loading import is_mixture
from rlexp.training.model.policy import CRITIC
from rlexp.training.reference.stored import kept_dtype
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.deal import Draws
from rlexp.training.rollout.sampling import Forward
from rlexp.training.rollout.sources import Colocated, Pipelined, Source
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.surroundings import HERE, Surroundings

VLLM_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32, Precision.fp64: torch.float32}


def build_source(run: TrainingRun, bridge: Bridge | None, around: Surroundings) -> Source:
    in_step = run.engine.sharded and run.world.size > 1
    model = run.engine.policy.model
    cfg = run.cfg
    if bridge is not None:  # these ranks train; they draw answers to held-out prompts only, without another engine
        cfg = replace(cfg, rollout=replace(cfg.rollout, engine=RolloutEngine.native))
    drawer = build_drawer(cfg, run.engine.decode, model, run.tokenizer, run.device, in_step=in_step, around=around)
    alone = Colocated(drawer, run.engine.merged, run.cfg.rollout, run.world)
    if bridge is None:
        return alone
    steps_each = run.cfg.rollout.epochs * run.cfg.rollout.minibatches
    return Pipelined(
        bridge=bridge,
        world=run.world,
        weights=lambda: policy_weights(run.engine),
        dtype=run.dtype,
        rollouts=-(-run.total_steps // steps_each),
        alone=alone,
    )


def policy_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Return the trained weights but the critic's: ranks that only sample have no critic, and loaded what is frozen."""
    return ((name, weight) for name, weight in engine.weights(trained=True) if not name.startswith(CRITIC))


def build_drawer(
    cfg: Config,
    forward: Forward,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    *,
    in_step: bool = False,
    around: Surroundings = HERE,
) -> Draws:
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "ends": ends_of(model, tokenizer),
        "cfg": cfg.rollout,
        "seed": cfg.seed,
        "device": device,
        "dtype": kept_dtype(cfg.train.precision),
    }
    if cfg.rollout.engine is RolloutEngine.native:
        return around.drawer(**common, forward=forward, in_step=in_step)
    from rlexp.training.rollout.vllm.drawer import VLLMDrawer

    refuse_renamed(model)
    describe, precision = partial(save_description, model, tokenizer), VLLM_DTYPES[cfg.train.precision]
    return VLLMDrawer(**common, write_model=describe, max_length=cfg.data.max_length, precision=precision)


def refuse_renamed(model: Any) -> None:
    """Refuse models that vLLM cannot be given new weights of: it knows weights by their names in a model's files, and
    rearranges those of experts once, when it loads them."""
    if is_mixture(model.config) or has_other_names(model):
        raise ModelError(
            f"rollout.engine=vllm: {type(model).__name__} is a mixture of experts, or its weights have other names in "
            f"files than in transformers. vLLM would not take its new weights. Use rollout.engine=native."
        )


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, and those that the model's configuration names."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = eos if isinstance(eos, list) else [eos]
    return sorted({int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None})
