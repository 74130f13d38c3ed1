"""What a run finds around it: models and rows, on disk or on the hub, and this machine. A rehearsal finds others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlexp.config.schema import Config, Device, ModelConfig
from rlexp.config.schema.rollouts import RewardConfig
from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.model.probe import probe, probe_decoding
from rlexp.training.reference.base import Reference
from rlexp.training.ring.kernels import BlockKernel, generation_here, get_kernel
from rlexp.training.rollout.draws import Draws
from rlexp.training.rollout.host import Host, build_host
from rlexp.training.rollout.rewards.build import build_reward
from rlexp.training.rollout.rewards.weighted import ModelTerm, Rewards
from rlexp.training.rollout.sampling import Drawer
from rlexp.training.rollout.scoring import RingRewardModel, Scorer
from rlexp.training.train.examples import Examples, read_examples
from rlexp.training.train.parts import Setting, TrainingRun
from rlexp.training.train.precompute import precomputed
from rlexp.training.train.ring_reward_model import ring_reward_model
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.train.task import Task
from rlexp.training.world.groups import World
from rlexp.training.world.shared_memory import Neighbours, meet


class Surroundings:
    has_packages = True  # of the run

    def examples(self, cfg: Config, tokenizer: Any, world: World, *, trains: bool) -> Examples:
        """Read the examples. A collective call."""
        return read_examples(cfg, tokenizer, world, trains=trains)

    def tokenizer(self, cfg: ModelConfig) -> Any:
        return load_tokenizer(cfg)

    # ---- models ----

    def model_config(self, cfg: ModelConfig, max_length: int) -> Any:
        return load_config(cfg, max_length)

    def model(self, *args: Any, **kwargs: Any) -> Any:
        return load_model(*args, **kwargs)

    def probe(self, *args: Any, **kwargs: Any) -> float:
        return probe(*args, **kwargs)

    def probe_decoding(self, *args: Any) -> float:
        return probe_decoding(*args)

    def stored_reference(
        self, setting: Setting, task: Task, model: ModelConfig, load: Callable[[], Frozen], *, trains: bool
    ) -> Reference:
        return precomputed(setting, task, model, load, trains=trains)

    # ---- the machine ----

    def device(self, cfg: Config) -> torch.device:
        cuda = cfg.launch.device is Device.cuda
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def generation(self, device: Device) -> int | None:
        """Return the major compute capability of this rank's GPU."""
        return generation_here() if device is Device.cuda else None

    def memory(self, device: torch.device) -> int | None:
        """Return the bytes of a GPU; None for a CPU."""
        return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None

    def kernel(self, *args: Any) -> BlockKernel:
        return get_kernel(*args)

    def neighbours(self, world: World) -> Neighbours | None:
        """Return the ranks that can share memory with this one. A collective call."""
        return meet(world.rank, world.size)

    # ---- rollouts ----

    def rewards(self, cfg: RewardConfig) -> Rewards:
        return build_reward(cfg)

    def reward_model(self, run: TrainingRun, term: ModelTerm) -> RingRewardModel:
        return ring_reward_model(run, term)

    def drawer(self, **parts: Any) -> Draws:
        return Drawer(**parts)

    def scorer(self, **parts: Any) -> Scorer:
        return Scorer(**parts)

    def rollouts(self, **parts: Any) -> Rollouts:
        return Rollouts(**parts)

    def host(self, world: World) -> Host:
        return build_host(world)


class Unprobed(Surroundings):
    """The models are known to work over a ring."""

    def probe(self, *_: Any, **__: Any) -> float:
        return 0.0

    def probe_decoding(self, *_: Any) -> float:
        return 0.0


HERE, UNPROBED = Surroundings(), Unprobed()
