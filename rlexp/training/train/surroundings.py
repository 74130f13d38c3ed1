"""What a run finds around it: models and rows, on disk or on the hub, and this machine. A rehearsal finds others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlexp.config.checks.layout import heads_in, windows_in
from rlexp.config.checks.micro_batches import scoring_at_once
from rlexp.config.schema import Config, Device
from rlexp.config.schema.reward_terms import RewardTerm
from rlexp.training.dealer.of_run import costs_of
from rlexp.training.dealer.packing import shard_pack
from rlexp.training.model.fused.classes import fuse, fuses
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.model.probe import probe, probe_decoding
from rlexp.training.model.reward_model import RewardModel
from rlexp.training.ring.kernels import BlockKernel, computing_in, generation_here, get_kernel
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.rollout.deal import Draws
from rlexp.training.rollout.experience import build_host
from rlexp.training.rollout.rewards.weighted import build_reward
from rlexp.training.rollout.sampling import Drawer
from rlexp.training.rollout.scoring import RingRewardModel, Scorer
from rlexp.training.train.examples import Examples, read_examples
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.precompute import precomputed
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.types import Pack
from rlexp.training.world.groups import World
from rlexp.training.world.shared_memory import Neighbours, meet


def ring_reward_model(
    run: TrainingRun,
    term: RewardTerm,
    *,
    make: Callable[..., RewardModel] = RewardModel,
    probing: Callable[..., float] = probe,
) -> RingRewardModel:
    """Build a reward model, whole on every rank, that scores over the ring.

    It has a precision of its own, so it runs over our own layout, which takes any; and heads of its own: where the
    run's layout cannot share them out, zigzag takes any. It is probed with sequences that are all cut.
    """
    model = make(term.cfg, term.key, run.tokenizer, run.cfg.data.max_length, run.device).to(run.device)
    if fuses(run.cfg.model.fused, run.device, model.head.weight.dtype):
        fuse(model.model)
    ring, described = run.world.ring, model.model.config.to_dict()
    heads, windows = heads_in(described), windows_in(described, model.max_length)
    fitting = heads is None or heads.queries % run.choice.ulysses_size == 0
    how = run.choice.how if fitting else ("zigzag", 1, "direct")
    costs = costs_of(run.cfg, described, scoring_at_once(run.cfg))
    layout = get_layout(*how, costs and replace(costs, trained=0.0))  # its head gives one number for a sequence
    ask = Ask(1.0, next(filter(None, windows), None))
    kernel = computing_in(model.head.weight.dtype, run.kernel, heads.size if heads else None, ask)
    probing(
        model.probed, model.model.config, ring=ring, layout=get_layout(*how), kernel=kernel,
        max_length=model.max_length, device=run.device, share=run.dealer.share is not None,
    )  # fmt: skip

    def score(pack: Pack) -> Tensor:
        shard = shard_pack(pack, ring, layout, kernel, model.max_length, windows).to(run.device)
        return model(shard, pack.end_S)

    return RingRewardModel(term.name, model.encode, score)


class Surroundings:
    has_packages = True  # of the run
    tokenizer = staticmethod(load_tokenizer)
    examples: Callable[..., Examples] = staticmethod(read_examples)

    # ---- models ----

    model_config = staticmethod(load_config)
    model: Callable[..., Any] = staticmethod(load_model)
    probe: Callable[..., float] = staticmethod(probe)
    probe_decoding: Callable[..., float] = staticmethod(probe_decoding)
    stored_reference = staticmethod(precomputed)

    # ---- the machine ----

    kernel: Callable[..., BlockKernel] = staticmethod(get_kernel)
    host = staticmethod(build_host)

    def device(self, cfg: Config) -> torch.device:
        cuda = cfg.launch.device is Device.cuda
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def generation(self, device: Device) -> int | None:
        """Return the major compute capability of this rank's GPU."""
        return generation_here() if device is Device.cuda else None

    def memory(self, device: torch.device) -> int | None:
        """Return the bytes of a GPU; None for a CPU."""
        return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None

    def neighbours(self, world: World) -> Neighbours | None:
        """Return the ranks that can share memory with this one. A collective call."""
        return meet(world.rank, world.size)

    # ---- rollouts ----

    rewards = staticmethod(build_reward)
    reward_model: Callable[[TrainingRun, RewardTerm], RingRewardModel] = staticmethod(ring_reward_model)
    drawer: Callable[..., Draws] = staticmethod(Drawer)
    scorer: Callable[..., Scorer] = staticmethod(Scorer)
    rollouts: Callable[..., Rollouts] = staticmethod(Rollouts)


class Unprobed(Surroundings):
    """The models are known to work over a ring."""

    def probe(self, *_: Any, **__: Any) -> float:
        return 0.0

    def probe_decoding(self, *_: Any) -> float:
        return 0.0


HERE, UNPROBED = Surroundings(), Unprobed()
