"""The parts of a run that draws its own samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from rlexp.algos.policy import PolicyLoss
from rlexp.config.schema import PolicyLossConfig, Precision
from rlexp.model.probe import probe
from rlexp.model.reward_model import RewardModel, last_places
from rlexp.ring.shard import shard_pack
from rlexp.rollout.colocated import Colocated
from rlexp.rollout.rewards.build import build_reward
from rlexp.rollout.rewards.weighted import ModelTerm
from rlexp.rollout.sampling import Drawer
from rlexp.rollout.scoring import Judge, Scorer
from rlexp.train.rollouts import Rollouts
from rlexp.types import Pack, Prompt

if TYPE_CHECKING:
    from rlexp.train.build import Run


def build_rollouts(run: Run, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> Rollouts:
    cfg = run.cfg
    assert isinstance(cfg.loss, PolicyLossConfig)
    loss = cast(PolicyLoss, run.loss)
    dtype = np.dtype(np.float64 if cfg.train.precision is Precision.fp64 else np.float32)
    rewards = build_reward(cfg.reward)
    drawer = Drawer(
        run.engine.decode,
        run.tokenizer,
        ends_of(run),
        cfg.rollout,
        cfg.seed,
        run.device,
        dtype,
        in_step=run.engine.sharded and run.world.size > 1,
    )
    scorer = Scorer(
        run.world,
        cfg.rollout.score_batch_size,
        run.pack,
        run.hold,
        run.engine.forward,
        run.reference if loss.needs_reference else None,
        [judge_of(run, term) for term in rewards.models],
        dtype,
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
        Colocated(drawer, cfg.rollout, run.world),
        rewards,
        scorer,
        run.world,
        run.device,
        run.phases,
    )


def judge_of(run: Run, term: ModelTerm) -> Judge:
    """A reward model, whole on every rank, over the ring."""
    model = RewardModel(term.cfg, term.key, run.tokenizer, run.cfg.data.max_length).to(run.device)
    ring, layout, kernel = run.world.ring, run.layout, run.kernel
    probe(model.probed, model.model.config, ring, layout, kernel, model.max_length, run.device)

    def score(pack: Pack) -> Tensor:
        shard = shard_pack(pack, ring, layout, kernel, model.max_length).to(run.device)
        scores_S: Tensor = model(shard, last_places(pack))
        return scores_S

    return Judge(term.name, model.encode, score)


def ends_of(run: Run) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those that the model says it ends with."""
    generation = getattr(run.engine.policy.model, "generation_config", None)
    said = getattr(generation, "eos_token_id", None)
    ends = said if isinstance(said, list) else [said]
    return sorted({int(end) for end in (*ends, run.tokenizer.eos_token_id) if end is not None})
