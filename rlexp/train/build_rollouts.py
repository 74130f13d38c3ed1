"""The parts of a run that draws its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from rlexp.algos.policy import PolicyLoss
from rlexp.config.layouts import heads_in
from rlexp.config.schema import Config, PolicyLossConfig, Precision, RolloutEngine
from rlexp.engine.base import Engine
from rlexp.model.export import save_description
from rlexp.model.policy import CRITIC
from rlexp.model.probe import probe
from rlexp.model.reward_model import RewardModel, last_places
from rlexp.ring.kernels import computing_in
from rlexp.ring.layouts import get_layout
from rlexp.ring.shard import shard_pack
from rlexp.rollout.colocated import Colocated
from rlexp.rollout.draws import Draws
from rlexp.rollout.host import build_host
from rlexp.rollout.pipelined import Pipelined
from rlexp.rollout.rewards.build import build_reward
from rlexp.rollout.rewards.weighted import ModelTerm
from rlexp.rollout.sampling import Drawer, Forward
from rlexp.rollout.scoring import Judge, Scorer
from rlexp.train.rollouts import Rollouts, Source
from rlexp.types import Pack, Prompt

if TYPE_CHECKING:
    from rlexp.train.build import Run


def build_rollouts(run: Run, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> Rollouts:
    cfg = run.cfg
    assert isinstance(cfg.loss, PolicyLossConfig)
    loss = cast(PolicyLoss, run.loss)
    rewards = build_reward(cfg.reward)
    scorer = Scorer(
        run.world,
        cfg.rollout.score_batch_size,
        run.pack,
        run.hold,
        run.engine.forward,
        run.reference,
        [judge_of(run, term) for term in rewards.models],
        kept_dtype(cfg),
        together=run.engine.sharded,
    )
    return Rollouts(
        cfg.rollout,
        cfg.loss,
        loss,
        cfg.seed,
        cfg.train.batch_size,
        prompts,
        eval_prompts,
        run.sampler,
        build_source(run),
        rewards,
        scorer,
        run.world,
        build_host(run.world),
        run.phases,
    )


def build_source(run: Run) -> Source:
    in_step = run.engine.sharded and run.world.size > 1
    model = run.engine.policy.model
    drawer = build_drawer(run.cfg, run.engine.decode, model, run.tokenizer, run.device, in_step=in_step)
    alone = Colocated(drawer, lambda: policy_weights(run.engine), run.cfg.rollout, run.world)
    if run.bridge is None:
        return alone
    steps_each = run.cfg.rollout.epochs * run.cfg.rollout.minibatches
    rollouts = -(-run.total_steps // steps_each)
    return Pipelined(run.bridge, run.world, lambda: policy_weights(run.engine), run.dtype, rollouts, alone)


def policy_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Without the critic's: those that sample have none."""
    return ((name, weight) for name, weight in engine.weights() if not name.startswith(CRITIC))


def kept_dtype(cfg: Config) -> np.dtype[Any]:
    """Of what is kept of each token."""
    return np.dtype(np.float64 if cfg.train.precision is Precision.fp64 else np.float32)


def build_drawer(
    cfg: Config, forward: Forward, model: Any, tokenizer: Any, device: torch.device, *, in_step: bool = False
) -> Draws:
    ends = ends_of(model, tokenizer)
    match cfg.rollout.engine:
        case RolloutEngine.native:
            return Drawer(forward, tokenizer, ends, cfg.rollout, cfg.seed, device, kept_dtype(cfg), in_step=in_step)
        case RolloutEngine.vllm:
            from rlexp.rollout.vllm import VLLMDrawer

            def write_model(place: Path) -> None:
                save_description(model, tokenizer, place)

            length = cfg.data.max_length
            return VLLMDrawer(write_model, tokenizer, ends, cfg.rollout, cfg.seed, length, kept_dtype(cfg))


def judge_of(run: Run, term: ModelTerm) -> Judge:
    """A reward model, whole on every rank, over the ring; over our own layout, since it has a precision of its own. It
    has heads of its own too: where the run's layout cannot share them out, zigzag takes any."""
    model = RewardModel(term.cfg, term.key, run.tokenizer, run.cfg.data.max_length).to(run.device)
    heads = heads_in(model.model.config.to_dict())
    fitting = heads is None or heads.queries % run.choice.ulysses_size == 0
    ring, layout = run.world.ring, run.own_layout if fitting else get_layout("zigzag")
    kernel = computing_in(model.head.weight.dtype, run.kernel, heads.size if heads else None)
    probe(model.probed, model.model.config, ring, layout, kernel, model.max_length, run.device)

    def score(pack: Pack) -> Tensor:
        shard = shard_pack(pack, ring, layout, kernel, model.max_length).to(run.device)
        scores_S: Tensor = model(shard, last_places(pack))
        return scores_S

    return Judge(term.name, model.encode, score)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those that the model says it ends with."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = said if isinstance(said, list) else [said]
    return sorted({int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None})
