"""Make every choice of a run, once. What comes after branches on nothing but cadence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ModelError
from rlexp.base.kernel_needs import able, installed, takes
from rlexp.config.adapter_folder import read_adapter
from rlexp.config.checks.backend import check_backend
from rlexp.config.checks.kernel import check_kernel, tokens_of_rank
from rlexp.config.checks.layout import Choice, choose, heads_in, windows_in
from rlexp.config.checks.micro_batches import shares
from rlexp.config.checks.reference import check_heads, model_of_reference
from rlexp.config.schema import (
    BackendName,
    Config,
    EngineConfig,
    EngineName,
    LoraConfig,
    ModelConfig,
    NoAdapterConfig,
    Offload,
    OptimConfig,
)
from rlexp.config.schema.losses import CriticName, PPOConfig
from rlexp.config.schema.models import Precision, ReferenceName
from rlexp.training.dataset.sampler import total_steps
from rlexp.training.dealer.of_run import costs_of, dealer_of
from rlexp.training.engine.base import Engine, shape_of
from rlexp.training.engine.frozen import Frozen
from rlexp.training.engine.plain import PlainEngine
from rlexp.training.engine.streamed import Streamed
from rlexp.training.metrics.memory import Phases
from rlexp.training.model.adapter import plain_name
from rlexp.training.model.fused.classes import fuses
from rlexp.training.model.head import logits_at_once
from rlexp.training.model.loading import end_with_template, in_pieces
from rlexp.training.model.placing import Placing, by_rows, evenly, put_all
from rlexp.training.model.policy import CRITIC, DTYPES, Critic, Policy
from rlexp.training.model.prepared import named_base
from rlexp.training.model.score_head import padding_of
from rlexp.training.reference.models import OfAdapter, OfModel, Reference
from rlexp.training.ring.base import Window
from rlexp.training.ring.collectives import ring_sum
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.ring.layouts.ring_flash_attn import library_layout
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.train.examples import refuse_foreign_tokens
from rlexp.training.train.operations import of_reference, of_training, peak_of
from rlexp.training.train.parts import Setting, TrainingRun
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.schedule import Schedule, warm_up_of
from rlexp.training.train.surroundings import HERE, Surroundings
from rlexp.training.train.task import Task
from rlexp.training.types import Wanted
from rlexp.training.world.groups import Ring, World, build_world
from rlexp.training.world.shared_memory import Neighbours


def build(
    cfg: Config,
    phases: Phases | None = None,
    bridge: Bridge | None = None,
    *,
    trains: bool = True,
    around: Surroundings = HERE,
) -> Task:
    """Build the same task on every rank; whatever is refused, all ranks refuse. A collective call.

    Without `trains` the task can only evaluate: it has no rows to train on, and its weights have no optimizer.
    """
    torch.use_deterministic_algorithms(cfg.launch.deterministic)
    model_config = around.model_config(cfg.model, cfg.data.max_length)
    choice = layout_of(cfg, model_config, around)
    world = build_world(cfg.parallel.ring_size, choice.ulysses_size)
    device = around.device(cfg)
    connect(world.ring, device)
    own_layout = get_layout(*choice.how)
    dtype = DTYPES[cfg.train.precision]
    tokenizer = around.tokenizer(cfg.model)
    examples = around.examples(cfg, tokenizer, world, trains=trains)
    task: Task = RolloutTask(cfg, examples, bridge, around) if cfg.loss.draws else RowsTask(cfg, examples)
    wanted = task.wanted if trains else task.wanted_of_evaluation
    models = models_of(cfg, model_config, wanted, around)
    windows = tuple(each for _, config in models for each in windows_in(config.to_dict(), cfg.data.max_length))
    kernel = kernel_for(cfg, models, windows, device, around)
    for model, config in models:
        around.probe(model, config, ring=world.ring, layout=own_layout, kernel=kernel, max_length=cfg.data.max_length,
                     device=device, share=shares(cfg))  # fmt: skip
    described = model_config.to_dict()
    setting = Setting(
        cfg=cfg, world=world, device=device, choice=choice, layout=build_layout(cfg, choice, described), kernel=kernel,
        dealer=dealer_of(cfg, heads_in(described), world.dp_size),
        windows=windows, tokenizer=tokenizer,
        schedule=build_schedule(cfg, task.steps_per_epoch), phases=phases or Phases(device),
    )  # fmt: skip
    stored = None
    if wanted.reference and cfg.reference.name is ReferenceName.precompute:
        stored = stored_reference(setting, task, models[-1], around, trains=trains)
    placing = placing_for(cfg, device, world, frozen=not trains)
    policy = build_policy(cfg, model_config, device, wanted, placing, around)
    hold_to_tokenizer(policy, task, tokenizer)
    end_with_template(policy.model, tokenizer, cfg.model)
    policy.recompute_activations(cfg.memory.recomputed)
    engine: Engine = (
        build_engine(cfg.engine, policy, cfg.optim, world, dtype)
        if trains
        else build_frozen(cfg.engine, policy, world, dtype)
    )
    run = run_of(setting, engine)
    reference = build_reference(run, models[-1], wanted, around) if wanted.reference and stored is None else stored
    run = replace(run, operations=run.operations + of_reference(reference))
    if wanted.decoding:
        around.probe_decoding(cfg.model, model_config, cfg.data.max_length, device)
    task.start(run, reference)
    return task


def run_of(setting: Setting, engine: Engine) -> TrainingRun:
    named = engine.policy.model.named_parameters()
    parameters = sum(shape_of(parameter).numel() for name, parameter in named if plain_name(name) is not None)
    trained = sum(shape.numel() for name, shape in engine.shapes().items() if not name.startswith(CRITIC))
    return TrainingRun(
        **vars(setting), engine=engine, parameters=parameters, trained=trained,
        operations=of_training(engine.policy), peak=peak_of(setting.cfg, setting.device),
    )  # fmt: skip


def connect(ring: Ring, device: torch.device) -> None:
    """Let all ranks of a group over which keys travel call together: so NCCL connects it, and a send cannot."""
    if device.type == "cuda":
        for group in filter(None, (ring, ring.outer)):
            ring_sum(torch.zeros((), device=device), group)


def layout_of(cfg: Config, model_config: Any, around: Surroundings) -> Choice:
    """Return the layout for the model's heads; refuse a backend or kernel that cannot compute them."""
    heads = heads_in(model_config.to_dict())
    check_backend(cfg, heads)
    check_kernel(cfg, heads, here=around.has_packages, generation=around.generation(cfg.launch.device))
    return choose(cfg, heads)


def hold_to_tokenizer(policy: Policy, task: Task, tokenizer: Any) -> None:
    """Refuse tokens that the model does not have; and let its configuration say where a score is read."""
    refuse_foreign_tokens(task.examples, policy.model.get_input_embeddings().num_embeddings)
    if task.wanted.scores:
        policy.model.config.pad_token_id = padding_of(policy.model.config, tokenizer)


def build_schedule(cfg: Config, steps_per_epoch: int) -> Schedule:
    optim, steps = cfg.optim, total_steps(steps_per_epoch, cfg.train.max_steps, cfg.train.epochs)
    warm_up = optim.warmup_steps if optim.warmup_ratio is None else warm_up_of(steps, optim.warmup_ratio)
    return Schedule(optim.lr, warm_up, steps, optim.decay, optim.warmup_start, optim.min_lr_ratio)


def build_layout(cfg: Config, choice: Choice, described: Mapping[str, Any]) -> Layout:
    """Return our own layout, which gives sequences their widths, or the backend's layout of the same name.

    A model is probed over our own in both cases, since probing is in float64, with sequences that are all cut; tests
    hold the backend's to ours.
    """
    if cfg.parallel.backend is not BackendName.native:
        return library_layout(choice.layout.value)
    return get_layout(*choice.how, costs_of(cfg, described))


def build_policy(
    cfg: Config, config: Any, device: torch.device, wanted: Wanted, placing: Placing | None, around: Surroundings = HERE
) -> Policy:
    """Load the starting weights: into their place, or in pieces from the first moment under ZeRO-3."""
    load, float64 = around.model, cfg.train.precision is Precision.fp64
    critic = None
    lora = cfg.adapter if isinstance(cfg.adapter, LoraConfig) else None
    at = placing
    if lora is not None and placing is not None and not trains_whole(lora, wanted):
        # Frozen weights are kept in the dtype that computes.
        at = replace(placing, dtype=DTYPES[cfg.train.precision], part=None if placing.whole else placing.part)
    with pieces_for(cfg.engine):
        model = load(cfg.model, config, cfg.data.max_length, at, float64=float64, scores=wanted.scores)
        if wanted.values is not None:
            own = wanted.values is CriticName.own
            trunk = load(cfg.model, config, cfg.data.max_length, at, float64=float64).base_model if own else None
            critic = Critic(model.get_output_embeddings().in_features, trunk)
    policy = Policy(model, critic, wanted)
    if lora is not None:
        beside = wanted.reference and cfg.reference.name is ReferenceName.adapter
        policy.adapt(lora, base=named_base(cfg.model), seed=cfg.seed, copy=beside)
    if placing is None:
        policy.to(device)
    else:
        put_all(policy, placing)
    if isinstance(cfg.loss, PPOConfig) and cfg.loss.value_lr is not None:
        policy.critic_lr_scale = cfg.loss.value_lr / cfg.optim.lr  # 0 is refused
    if fuses(cfg.model.fused, device, DTYPES[cfg.train.precision]):
        policy.fuse()
    memory = around.memory(device)
    share = None if memory is None else memory // cfg.launch.ranks_per_gpu
    policy.logps.most = logits_at_once(share, fused=policy.fused is not None)
    policy.freeze(cfg.model.freeze)
    if not ENGINES[cfg.engine.name.value].replicated:
        policy.refuse_listed_experts(cfg.engine.name.value)
    return policy


def trains_whole(lora: LoraConfig, wanted: Wanted) -> bool:
    """Say whether modules are trained beside an adapter: their exact values must then arrive."""
    return bool(lora.also) or wanted.scores or (lora.path is not None and bool(read_adapter(lora.path).also))


def placing_for(cfg: Config, device: torch.device, world: World, *, frozen: bool = False) -> Placing | None:
    """Say where the weights go, by the engine that will hold them; None where it loads them in pieces itself."""
    traits, dtype = ENGINES[cfg.engine.name.value], DTYPES[cfg.train.precision]
    steps = torch.promote_types(dtype, torch.float32)
    if traits.loads_pieces:
        return None
    if traits.sharded:
        part = partial(by_rows, world.rank, world.size)
        return Placing(device, dtype if frozen else steps, part, whole=False)
    if traits.replicated:  # its float32 masters are the weights that arrive
        return Placing(device, dtype if frozen else steps)
    return Placing(device, dtype, None if frozen else partial(evenly, world.rank, world.size))


def pieces_for(cfg: EngineConfig) -> contextlib.AbstractContextManager[Any]:
    if not ENGINES[cfg.name.value].loads_pieces:
        return contextlib.nullcontext()
    from rlexp.training.engine.zero import loading_config

    return in_pieces(loading_config(cfg))


def build_engine(cfg: EngineConfig, policy: Policy, optim: OptimConfig, world: World, dtype: torch.dtype) -> Engine:
    match cfg.name:
        case EngineName.torch:
            return PlainEngine(policy, optim, world, dtype)
        case EngineName.fsdp2:
            from rlexp.training.engine.fsdp2 import FSDP2Engine

            return FSDP2Engine(policy, optim, world, dtype)
        case _:
            from rlexp.training.engine.zero import build_zero  # here, since DeepSpeed takes seconds to import

            return build_zero(cfg, policy, optim, world, dtype)


def build_frozen(
    cfg: EngineConfig,
    policy: Policy,
    world: World,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    among: Neighbours | None = None,
) -> Frozen:
    """Hold weights that nothing trains, in pieces where the engine holds them so. Weights of the host are on the device
    only while they are used there; whole ones are shared `among` the ranks of a machine."""
    match cfg.name:
        case EngineName.fsdp2:
            from rlexp.training.engine.fsdp2 import FrozenRows

            return FrozenRows(policy, world, dtype, device)
        case EngineName.zero3:
            from rlexp.training.engine.zero import FrozenPieces

            return FrozenPieces(cfg, policy, world, dtype)
        case _:
            return Frozen(cfg.name.value, policy) if device is None else Streamed(cfg.name.value, policy, device, among)


def models_of(cfg: Config, policy_config: Any, wanted: Wanted, around: Surroundings) -> list[tuple[ModelConfig, Any]]:
    """Return the policy and the model in reference.path, with their configurations; refuse one that does not fit."""
    policy = (cfg.model, policy_config)
    if cfg.reference.path is None or not wanted.reference:
        return [policy]
    model = model_of_reference(cfg)
    config = around.model_config(model, cfg.data.max_length)
    ours, theirs = (each.get_text_config().vocab_size for each in (policy_config, config))
    if ours != theirs:
        raise ModelError(
            f"reference.path={model.path}: has a vocabulary of {theirs} tokens, and the policy of {ours}. Give a "
            f"reference model with the policy's tokenizer."
        )
    heads = heads_in(config.to_dict())
    check_heads(cfg, heads, here=False)
    choose(cfg, heads)
    return [policy, (model, config)]


def kernel_for(
    cfg: Config, models: Sequence[tuple[ModelConfig, Any]], windows: Sequence[Window], device: torch.device,
    around: Surroundings,
) -> BlockKernel:  # fmt: skip
    """Return the policy's kernel, which must compute the reference model too, and any of their windows."""
    policy, *others = (heads_in(config.to_dict()) for _, config in models)
    ask, size = Ask(1.0, next(filter(None, windows), None)), policy.size if policy else None

    def chosen(size: int | None) -> BlockKernel:
        return around.kernel(
            cfg.parallel.kernel.value, device.type, DTYPES[cfg.train.precision], size, ask, tokens_of_rank(cfg),
            around.generation(cfg.launch.device),
        )  # fmt: skip

    def takes_all(kernel: BlockKernel) -> bool:
        sizes = [size, *(heads.size for heads in filter(None, others))]
        return all(each is None or takes(kernel.name, each, kernel.generation) for each in sizes)

    # `auto` takes the fastest for the policy's heads; or that for the reference model's, if it alone takes both.
    candidates = [chosen(size), *(chosen(heads.size) for heads in filter(None, others))]
    kernel = next(filter(takes_all, candidates), candidates[0])
    for heads in filter(None, others):
        if not takes(kernel.name, heads.size, kernel.generation):
            for_it = [
                each for each in able(kernel.generation, heads.size) if installed(each) and takes(each, heads.size)
            ]
            for_both = [each for each in for_it if size is None or takes(each, size, kernel.generation)]
            instead = [f"parallel.kernel={each}" for each in (*for_both, "plain")]
            raise ModelError(
                f"reference.path={cfg.reference.path}: has heads of size {heads.size}, which the policy's kernel, "
                f"{kernel.name}, does not take. Use {' or '.join(instead)}."
            )
    return kernel


def build_reference(
    run: TrainingRun, model: tuple[ModelConfig, Any], wanted: Wanted, around: Surroundings
) -> Reference:
    """Build what the policy is compared with: after the engine, which needs more memory while it is built."""
    if run.cfg.reference.name is ReferenceName.adapter:
        return OfAdapter(run.engine)
    return OfModel(frozen_model(run, model, wanted, around))


def stored_reference(
    setting: Setting, task: Task, model: tuple[ModelConfig, Any], around: Surroundings, *, trains: bool
) -> Reference:
    """Return what is kept of a model, or compute it: before there is a policy, so that memory never holds both."""

    def load() -> Frozen:
        frozen = frozen_model(setting, model, task.wanted, around)
        hold_to_tokenizer(frozen.policy, task, setting.tokenizer)
        return frozen

    return around.stored_reference(setting, task, model[0], load, trains=trains)


def frozen_model(run: Setting, model: tuple[ModelConfig, Any], wanted: Wanted, around: Surroundings) -> Frozen:
    """Load and freeze a model: the starting weights, with the adapter that training starts from, or another."""
    cfg = replace(run.cfg, model=model[0])
    if cfg.reference.path is not None or (isinstance(cfg.adapter, LoraConfig) and cfg.adapter.path is None):
        cfg = replace(cfg, adapter=NoAdapterConfig())  # a new adapter changes nothing
    offload = cfg.reference.offload
    if offload and ENGINES[cfg.engine.name.value].loads_pieces:
        cfg = replace(cfg, engine=replace(cfg.engine, offload=Offload.all))
    placing, among = placing_of_frozen(cfg, run, around)
    policy = build_policy(cfg, model[1], run.device, wanted.frozen, placing, around)
    device = run.device if offload else None
    return build_frozen(cfg.engine, policy, run.world, run.dtype, device=device, among=among)


def placing_of_frozen(cfg: Config, run: Setting, around: Surroundings) -> tuple[Placing | None, Neighbours | None]:
    """Say where the weights of a reference go. Those of the host, where the engine keeps them whole, are loaded by one
    rank of each machine; the ranks that share them are returned too. A collective call."""
    if not cfg.reference.offload:
        return placing_for(cfg, run.device, run.world, frozen=True), None
    placing = placing_for(cfg, torch.device("cpu"), run.world, frozen=True)
    if placing is None or not placing.whole:
        return placing, None
    among = around.neighbours(run.world)
    return (placing if among is None or among.leads else replace(placing, elsewhere=True)), among
