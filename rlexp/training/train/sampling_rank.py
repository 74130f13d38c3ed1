"""The life of a rank that only samples: it holds the policy and a cache, no engine, no critic and no reference."""

from __future__ import annotations

import dataclasses

import torch

from rlexp.config.schema import Config, EngineConfig, EngineName
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.launch.joining import leave_world
from rlexp.launch.stops import Outcome, finishing_steps
from rlexp.training.engine.base import trained
from rlexp.training.model.loading import load_config, load_tokenizer
from rlexp.training.model.placing import Placing
from rlexp.training.model.policy import DTYPES, Policy
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.draws import Weights
from rlexp.training.rollout.pipelined import serve
from rlexp.training.train.build import build_policy
from rlexp.training.train.build_rollouts import build_drawer
from rlexp.training.train.examples import read_examples, sampler_of
from rlexp.training.train.surroundings import HERE
from rlexp.training.types import Example, Wanted
from rlexp.training.world.groups import ALONE, World


def sample_for(cfg: Config, bridge: Bridge) -> Outcome:
    torch.use_deterministic_algorithms(cfg.launch.deterministic)
    device = HERE.device(cfg)
    tokenizer = load_tokenizer(cfg.model)
    examples = read_examples(cfg, tokenizer, World(0, 1, ALONE))
    sampler = sampler_of(cfg, cfg.loss.rows, len(examples.train), examples.mixture)
    whole = dataclasses.replace(cfg, engine=EngineConfig(EngineName.torch))  # whole on every rank: each samples alone
    wanted = Wanted(temperature=cfg.rollout.temperature)
    # vLLM has the weights on the device. These are handed over to it, and need not be there too.
    at = torch.device("cpu") if cfg.rollout.engine is RolloutEngine.vllm else device
    placing = Placing(at, DTYPES[cfg.train.precision])
    policy = build_policy(whole, load_config(cfg.model, cfg.data.max_length), at, wanted, placing)
    handed_over = trained(policy)
    policy.eval().requires_grad_(False)
    drawer = build_drawer(cfg, torch.no_grad()(policy), policy.model, tokenizer, device)

    def prompts_of(number: int) -> list[Example]:
        return [examples.train[index] for index in sampler.batch(number + 1).indices]

    with finishing_steps(cfg.launch.grace_seconds):  # the training ranks save what is being drawn
        serve(bridge, drawer, handed_over, weights_of(policy), cfg.rollout, prompts_of)
    leave_world()
    return Outcome()


def weights_of(policy: Policy) -> Weights:
    """Return what yields the weights that another engine draws by, with an adapter merged into them."""
    adapter, held = policy.adapter, policy.model.named_parameters
    return held if adapter is None else lambda: adapter.merged(held())
