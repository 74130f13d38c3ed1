"""Reward models that score over the ring."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlexp.config.checks.layout import heads_in, windows_in
from rlexp.config.schema.reward_terms import RewardTerm
from rlexp.training.dealer.packing import shard_pack
from rlexp.training.model.fused.classes import fuse, fuses
from rlexp.training.model.probe import probe
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.ring.kernels import computing_in
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout.scoring import RingRewardModel
from rlexp.training.train.parts import TrainingRun
from rlexp.training.types import Pack


def ring_reward_model(
    run: TrainingRun,
    term: RewardTerm,
    *,
    make: Callable[..., RewardModel] = RewardModel,
    probing: Callable[..., float] = probe,
) -> RingRewardModel:
    """Build a reward model, whole on every rank, that scores over the ring.

    It has a precision of its own, so it runs over our own layout, which takes any; and heads of its own: where the
    run's layout cannot share them out, zigzag takes any.
    """
    model = make(term.cfg, term.key, run.tokenizer, run.cfg.data.max_length, run.device).to(run.device)
    if fuses(run.cfg.model.fused, run.device, model.head.weight.dtype):
        fuse(model.model)
    heads = heads_in(model.model.config.to_dict())
    fitting = heads is None or heads.queries % run.choice.ulysses_size == 0
    ring, layout = run.world.ring, get_layout(*run.choice.how) if fitting else get_layout("zigzag")
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
