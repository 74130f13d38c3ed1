"""Every choice of a run, made once. What comes after branches on nothing but cadence."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from rlexp.algos.base import PreferenceLoss
from rlexp.algos.dpo import DPO
from rlexp.algos.dr_grpo import DrGRPO
from rlexp.algos.grpo import GRPO
from rlexp.algos.gspo import GSPO
from rlexp.algos.policy import PolicyLoss
from rlexp.algos.ppo import PPO
from rlexp.algos.reinforce_pp import ReinforcePP
from rlexp.algos.rloo import RLOO
from rlexp.config.backend import check_backend
from rlexp.config.kernels import check_kernel
from rlexp.config.layouts import Choice, choose, heads_in
from rlexp.config.schema import (
    BackendName,
    Config,
    CriticName,
    Device,
    DPOConfig,
    DrGRPOConfig,
    EngineConfig,
    EngineName,
    GRPOConfig,
    GSPOConfig,
    OptimConfig,
    PolicyLossConfig,
    PPOConfig,
    Precision,
    ReinforcePPConfig,
    RLOOConfig,
)
from rlexp.data.packing import pack_pairs, pack_sequences
from rlexp.data.sampler import Sampler, total_steps
from rlexp.engine.base import Engine, shape_of
from rlexp.engine.plain import PlainEngine
from rlexp.engines import ENGINES
from rlexp.metrics.memory import Phases
from rlexp.model.loading import in_pieces, load_config, load_model, load_tokenizer
from rlexp.model.policy import DTYPES, Critic, Entropy, Policy, cast_parameters
from rlexp.model.probe import probe, probe_decoding
from rlexp.ring.groups import World, build_world
from rlexp.ring.kernels import BlockKernel, get_kernel
from rlexp.ring.layouts import Layout, get_layout
from rlexp.ring.layouts.ring_flash_attn import library_layout
from rlexp.ring.shard import shard_pack
from rlexp.rollout.bridge import Bridge
from rlexp.train.build_rollouts import build_rollouts
from rlexp.train.examples import Examples, build_sampler, read_pairs, read_prompts, refuse_foreign_tokens
from rlexp.train.rollouts import Rollouts
from rlexp.train.schedule import Schedule
from rlexp.types import Ids, Pack, Pair, Shard, TokenLogps


@dataclass(frozen=True)
class Run:
    """All that a step needs. Built anew on every rank, from the same configuration."""

    cfg: Config
    world: World
    device: torch.device
    choice: Choice
    layout: Layout
    kernel: BlockKernel
    tokenizer: Any
    pairs: Sequence[Pair]
    eval_pairs: Sequence[Pair]
    dropped: Counter[str]
    eval_dropped: Counter[str]
    sampler: Sampler
    schedule: Schedule
    engine: Engine
    reference: Callable[[Shard], TokenLogps] | None  # where the loss needs one
    loss: Any  # a PreferenceLoss; a PolicyLoss where there are rollouts
    parameters: int
    phases: Phases
    bridge: Bridge | None = field(default=None, kw_only=True)  # to the ranks that only sample
    # What a run that draws its own samples has in place of pairs.
    rollouts: Rollouts | None = field(default=None, kw_only=True)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.cfg.train.precision]

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch * (self.rollouts.steps_each if self.rollouts else 1)

    @property
    def own_layout(self) -> Layout:
        """Ours of the name of the run's: in any precision, which those of others are not."""
        return get_layout(self.choice.layout.value, self.choice.ulysses_size)

    @property
    def attention(self) -> str:
        """Who computes it, for people."""
        native = self.cfg.parallel.backend is BackendName.native
        return f"{self.choice.name}, {self.kernel.name if native else self.cfg.parallel.backend.value}"

    def shard(self, pairs: Sequence[Pair]) -> Shard:
        """This rank's part of a micro-batch, on its device."""
        return self.hold(pack_pairs(pairs, self.layout.multiple(self.world.ring.size), **self._padding))

    def pack(self, sequences: Sequence[tuple[Ids, Ids]]) -> Pack:
        """Of prompts with their answers."""
        return pack_sequences(sequences, self.layout.multiple(self.world.ring.size), **self._padding)

    @property
    def _padding(self) -> dict[str, Any]:
        return {"unit": self.layout.unit(self.world.ring.size), "packing": self.cfg.data.packing}

    def hold(self, pack: Pack) -> Shard:
        """This rank's part of a pack, on its device."""
        length = self.cfg.data.max_length
        return shard_pack(pack, self.world.ring, self.layout, self.kernel, length).to(self.device)


def generation_of(device: Device) -> int | None:
    """The major compute capability of this rank's GPU."""
    return torch.cuda.get_device_capability()[0] if device is Device.cuda and torch.cuda.is_available() else None


def build(cfg: Config, phases: Phases | None = None, bridge: Bridge | None = None) -> Run:
    """A collective call: every rank builds the same run, and what is refused is refused on all."""
    model_config = load_config(cfg.model, cfg.data.max_length)
    heads = heads_in(model_config.to_dict())
    check_backend(cfg, heads)
    check_kernel(cfg, heads, generation=generation_of(cfg.launch.device))
    choice = choose(cfg, heads)
    world = build_world(cfg.parallel.ring_size, timedelta(seconds=cfg.launch.timeout_seconds), choice.ulysses_size)
    device = device_of(cfg)
    own_layout = get_layout(choice.layout.value, choice.ulysses_size)
    layout = build_layout(cfg, own_layout)
    dtype = DTYPES[cfg.train.precision]
    kernel = get_kernel(cfg.parallel.kernel.value, device.type, dtype, heads.size if heads else None)
    tokenizer = load_tokenizer(cfg.model)
    loss = build_loss(cfg)
    samples_itself = isinstance(cfg.loss, PolicyLossConfig)
    examples = read_prompts(cfg, tokenizer, world) if samples_itself else read_pairs(cfg, tokenizer, world)
    sampler = build_sampler(cfg, len(examples.train))
    steps_each = cfg.rollout.epochs * cfg.rollout.minibatches if samples_itself else 1
    steps = total_steps(sampler.steps_per_epoch * steps_each, cfg.train.max_steps, cfg.train.epochs)
    probe(cfg.model, model_config, world.ring, own_layout, kernel, cfg.data.max_length, device)
    policy = build_policy(cfg, model_config, device, loss)
    refuse_foreign_tokens([*examples.train, *examples.held_out], policy.model.get_input_embeddings().num_embeddings)
    reference = None
    if loss.needs_reference:
        reference = build_reference(cfg, lambda: build_policy(cfg, model_config, device), dtype, world)
    if cfg.memory.checkpointing:
        policy.recompute_activations()
    pairs = Examples((), (), examples.dropped, examples.held_out_dropped) if samples_itself else examples
    run = Run(
        cfg, world, device, choice, layout, kernel, tokenizer,
        pairs.train, pairs.held_out, pairs.dropped, pairs.held_out_dropped, sampler,
        Schedule(cfg.optim.lr, cfg.optim.warmup_steps, steps, cfg.optim.decay),
        build_engine(cfg.engine, policy, cfg.optim, world, dtype),
        reference,
        loss,
        sum(shape_of(parameter).numel() for parameter in policy.model.parameters()),
        phases or Phases(device),
        bridge=bridge,
    )  # fmt: skip
    if not samples_itself:
        return run
    probe_decoding(cfg.model, model_config, cfg.data.max_length, device)
    return replace(run, rollouts=build_rollouts(run, examples.train, examples.held_out))


def build_layout(cfg: Config, own: Layout) -> Layout:
    """Ours, or that of the same name of who is to compute it. A model is probed over ours in both cases, since that is
    done in float64; tests hold the one to the other."""
    match cfg.parallel.backend:
        case BackendName.native:
            return own
        case BackendName.ring_flash_attn:
            return library_layout(own.name)


def device_of(cfg: Config) -> torch.device:
    cuda = cfg.launch.device is Device.cuda
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def build_loss(cfg: Config) -> PreferenceLoss | PolicyLoss:
    match cfg.loss:
        case DPOConfig(beta=beta, label_smoothing=label_smoothing):
            return DPO(beta, label_smoothing)
        case PolicyLossConfig():
            return build_policy_loss(cfg.loss, cfg.rollout.importance_cap)
        case _:
            raise AssertionError(cfg.loss)


def build_policy_loss(cfg: PolicyLossConfig, importance_cap: float | None) -> PolicyLoss:
    common: dict[str, Any] = {
        "beta": cfg.beta,
        "kl_in": cfg.kl_in,
        "kl": cfg.kl,
        "clip_low": cfg.clip_low,
        "clip_high": cfg.clip_high,
        "dual_clip": cfg.dual_clip,
        "entropy": cfg.entropy,
        "importance_cap": importance_cap,
    }
    match cfg:
        case PPOConfig(gamma=gamma, lam=lam, value_coef=value_coef, value_clip=value_clip):
            return PPO(**common, gamma=gamma, lam=lam, value_coef=value_coef, value_clip=value_clip)
        case GRPOConfig():
            return GRPO(**common)
        case DrGRPOConfig():
            return DrGRPO(**common)
        case RLOOConfig():
            return RLOO(**common)
        case ReinforcePPConfig():
            return ReinforcePP(**common)
        case GSPOConfig():
            return GSPO(**common)
        case _:
            raise AssertionError(cfg)


def build_policy(
    cfg: Config, config: Any, device: torch.device, loss: PreferenceLoss | PolicyLoss | None = None
) -> Policy:
    """The model as it starts: the same on every rank, or under ZeRO-3 in pieces from the first moment. With `loss`,
    what that trains beside it."""
    float64 = cfg.train.precision is Precision.fp64
    temperature, critic, entropy = 1.0, None, Entropy.unasked
    with pieces_for(cfg.engine):
        model = load_model(cfg.model, config, cfg.data.max_length, float64=float64)
        if isinstance(cfg.loss, PPOConfig) and loss is not None:
            own = cfg.loss.critic is CriticName.own
            trunk = load_model(cfg.model, config, cfg.data.max_length, float64=float64).base_model if own else None
            critic = Critic(model.get_output_embeddings().in_features, trunk)
    if isinstance(cfg.loss, PolicyLossConfig):
        temperature = cfg.rollout.temperature
        entropy = Entropy.unasked if loss is None else Entropy.trained if cfg.loss.entropy else Entropy.logged
    policy = Policy(model, critic, temperature=temperature, entropy=entropy).to(device)
    if isinstance(cfg.loss, PPOConfig) and cfg.loss.value_lr is not None:
        policy.critic_lr_scale = cfg.loss.value_lr / cfg.optim.lr  # 0 is refused
    policy.freeze(cfg.model.freeze)
    if not ENGINES[cfg.engine.name.value].replicated:
        policy.refuse_listed_experts(cfg.engine.name.value)
    return policy


def pieces_for(cfg: EngineConfig) -> contextlib.AbstractContextManager[Any]:
    if not ENGINES[cfg.name.value].loads_pieces:
        return contextlib.nullcontext()
    from rlexp.engine.zero import loading_config

    return in_pieces(loading_config(cfg))


def build_engine(cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> Engine:
    match cfg.name:
        case EngineName.torch:
            return PlainEngine(policy, optim, world, dtype)
        case EngineName.fsdp2:
            from rlexp.engine.fsdp2 import FSDP2Engine

            return FSDP2Engine(policy, optim, world, dtype)
        case _:
            from rlexp.engine.zero import build_zero  # here, since DeepSpeed takes seconds to import

            return build_zero(cfg, policy, optim, world, dtype)


def build_reference(
    cfg: Config, policy: Callable[[], Policy], dtype: torch.dtype, world: World
) -> Callable[[Shard], TokenLogps]:
    """The starting weights, frozen, in the dtype that computes; in pieces where the engine holds them so."""
    starting = policy().eval().requires_grad_(False)
    match cfg.engine.name:
        case EngineName.zero3:
            from rlexp.engine import zero

            forward = zero.frozen(cfg.engine, starting, dtype)
        case EngineName.fsdp2:
            from rlexp.engine import fsdp2

            forward = fsdp2.frozen(starting, dtype, world)
        case _:
            cast_parameters(starting, dtype)
            forward = starting

    @torch.no_grad()
    def reference(shard: Shard) -> TokenLogps:
        return forward(shard)

    return reference
