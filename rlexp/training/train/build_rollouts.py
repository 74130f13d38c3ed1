"""Build the parts of a run that draws its own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import ModelError
from rlexp.config.checks.layout import heads_in, windows_in
from rlexp.config.checks.micro_batches import scoring_at_once
from rlexp.config.schema import Config
from rlexp.config.schema.losses import PolicyLossConfig
from rlexp.config.schema.models import Precision
from rlexp.config.schema.rollouts import RewardConfig, RolloutEngine
from rlexp.training.algos.policy_loss import PolicyLoss
from rlexp.training.dataset.sampler import Sampler
from rlexp.training.dealer.of_run import room_of
from rlexp.training.dealer.shard import shard_pack
from rlexp.training.engine.base import Engine
from rlexp.training.model.export import has_other_names, save_description
from rlexp.training.model.fused import fuse, fuses
from rlexp.training.model.loading import is_mixture
from rlexp.training.model.policy import CRITIC
from rlexp.training.model.probe import probe
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.reference.base import Reference
from rlexp.training.ring.kernels import computing_in
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.colocated import Colocated
from rlexp.training.rollout.draws import Draws
from rlexp.training.rollout.host import Host, build_host
from rlexp.training.rollout.pipelined import Pipelined
from rlexp.training.rollout.rewards.build import build_reward
from rlexp.training.rollout.rewards.weighted import ModelTerm, Rewards
from rlexp.training.rollout.sampling import Drawer, Forward
from rlexp.training.rollout.scoring import RingRewardModel, Scorer
from rlexp.training.train.examples import Examples
from rlexp.training.train.parts import Run
from rlexp.training.train.rollout_supply import Rollouts, Source
from rlexp.training.types import Pack
from rlexp.training.world.groups import World

VLLM_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32, Precision.fp64: torch.float32}


@dataclass(frozen=True)
class Parts:
    """What the parts of rollouts are made by. A rehearsal has others."""

    rewards: Callable[[RewardConfig], Rewards] = field(default_factory=lambda: build_reward)
    reward_model: Callable[[Run, ModelTerm], RingRewardModel] = field(default_factory=lambda: ring_reward_model)
    drawer: Callable[..., Draws] = Drawer
    scorer: Callable[..., Scorer] = Scorer
    rollouts: Callable[..., Rollouts] = Rollouts
    host: Callable[[World], Host] = build_host


def build_rollouts(
    run: Run,
    loss_cfg: PolicyLossConfig,
    loss: PolicyLoss,
    examples: Examples,
    sampler: Sampler,
    *,
    reference: Reference | None,
    bridge: Bridge | None,
    parts: Parts | None = None,
) -> Rollouts:
    cfg, parts = run.cfg, parts or Parts()
    rewards = parts.rewards(cfg.reward)
    scorer = parts.scorer(
        world=run.world,
        dealer=replace(run.dealer, replicas=1, room=room_of(cfg, scoring_at_once(cfg))),
        pack=run.pack,
        hold=run.to_device,
        policy=run.engine.forward,
        reference=reference,
        reward_models=[parts.reward_model(run, term) for term in rewards.models],
        dtype=kept_dtype(cfg),
        together=run.engine.sharded,
    )
    return parts.rollouts(
        cfg=cfg.rollout,
        loss_cfg=loss_cfg,
        loss=loss,
        seed=cfg.seed,
        train_batch=cfg.train.batch_size,
        prompts=examples.train,
        eval_prompts=examples.held_out,
        sampler=sampler,
        source=build_source(run, bridge, parts.drawer),
        rewards=rewards,
        scorer=scorer,
        world=run.world,
        host=parts.host(run.world),
        phases=run.phases,
    )


def build_source(run: Run, bridge: Bridge | None, native: Callable[..., Draws] = Drawer) -> Source:
    in_step = run.engine.sharded and run.world.size > 1
    model = run.engine.policy.model
    cfg = run.cfg
    if bridge is not None:  # these ranks train; they draw answers to held-out prompts only, without another engine
        cfg = replace(cfg, rollout=replace(cfg.rollout, engine=RolloutEngine.native))
    drawer = build_drawer(cfg, run.engine.decode, model, run.tokenizer, run.device, in_step=in_step, native=native)
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
    """Return the policy's trained weights without the critic's: ranks that only sample have no critic, and have loaded
    what is frozen."""
    return ((name, weight) for name, weight in engine.weights(trained=True) if not name.startswith(CRITIC))


def kept_dtype(cfg: Config) -> np.dtype[Any]:
    """Return the dtype of the values kept for each token."""
    return np.dtype(np.float64 if cfg.train.precision is Precision.fp64 else np.float32)


def build_drawer(
    cfg: Config,
    forward: Forward,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    *,
    in_step: bool = False,
    native: Callable[..., Draws] = Drawer,
) -> Draws:
    ends = ends_of(model, tokenizer)
    match cfg.rollout.engine:
        case RolloutEngine.native:
            return native(
                forward=forward,
                tokenizer=tokenizer,
                ends=ends,
                cfg=cfg.rollout,
                seed=cfg.seed,
                device=device,
                dtype=kept_dtype(cfg),
                in_step=in_step,
            )
        case RolloutEngine.vllm:
            from rlexp.training.rollout.vllm.drawer import VLLMDrawer

            refuse_renamed(model)

            def write_model(place: Path) -> None:
                save_description(model, tokenizer, place)

            return VLLMDrawer(
                write_model=write_model,
                tokenizer=tokenizer,
                ends=ends,
                cfg=cfg.rollout,
                seed=cfg.seed,
                max_length=cfg.data.max_length,
                device=device,
                precision=VLLM_DTYPES[cfg.train.precision],
                dtype=kept_dtype(cfg),
            )


def refuse_renamed(model: Any) -> None:
    """Refuse models that vLLM cannot be given new weights of: it knows weights by their names in a model's files, and
    rearranges those of experts once, when it loads them."""
    if is_mixture(model.config) or has_other_names(model):
        raise ModelError(
            f"rollout.engine=vllm: {type(model).__name__} is a mixture of experts, or its weights have other names in "
            f"files than in transformers. vLLM would not take its new weights. Use rollout.engine=native."
        )


def ring_reward_model(
    run: Run, term: ModelTerm, *, make: Callable[..., RewardModel] = RewardModel, probing: Callable[..., float] = probe
) -> RingRewardModel:
    """Build a reward model, whole on every rank, that scores over the ring.

    It has a precision of its own, so it runs over our own layout; and heads of its own: where the run's layout cannot
    share them out, zigzag takes any.
    """
    model = make(term.cfg, term.key, run.tokenizer, run.cfg.data.max_length, run.device).to(run.device)
    if fuses(run.cfg.model.fused, run.device, model.head.weight.dtype):
        fuse(model.model)
    heads = heads_in(model.model.config.to_dict())
    fitting = heads is None or heads.queries % run.choice.ulysses_size == 0
    ring, layout = run.world.ring, run.own_layout if fitting else get_layout("zigzag")
    windows = windows_in(model.model.config.to_dict(), model.max_length)
    ask = Ask(1.0, next(filter(None, windows), None))
    kernel = computing_in(model.head.weight.dtype, run.kernel, heads.size if heads else None, ask)
    probing(
        model.probed, model.model.config, ring=ring, layout=layout, kernel=kernel, max_length=model.max_length,
        device=run.device, share=run.dealer.share is not None,
    )  # fmt: skip

    def score(pack: Pack) -> Tensor:
        shard = shard_pack(pack, ring, layout, kernel, model.max_length, windows).to(run.device)
        scores_S: Tensor = model(shard, pack.end_S)
        return scores_S

    return RingRewardModel(term.name, model.encode, score)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, and those that the model's configuration names."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = said if isinstance(said, list) else [said]
    return sorted({int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None})
