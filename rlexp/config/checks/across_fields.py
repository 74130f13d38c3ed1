"""Rules across fields, checked once, before any process starts."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path

from rlexp.base import engine_facts
from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.checks.adapter import check_adapter
from rlexp.config.checks.backend import check_backend
from rlexp.config.checks.deepspeed import check_overrides
from rlexp.config.checks.files import expanded
from rlexp.config.checks.kernel import check_kernel
from rlexp.config.checks.layout import check_layout, heads_of
from rlexp.config.checks.loss import check_loss
from rlexp.config.checks.micro_batches import OF_SHARING, check_micro_batches
from rlexp.config.checks.model import check_pretrained
from rlexp.config.checks.reference import check_reference
from rlexp.config.checks.rewards import check_reward
from rlexp.config.checks.rope import with_rope_settled
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.checks.vllm import check_vllm
from rlexp.config.hardware import visible_gpus
from rlexp.config.schema import Checkpointing, Collectives, Config, Decay, Device, LaunchConfig, LoggerName
from rlexp.config.schema.bounds import check_bounds
from rlexp.config.schema.cadence import BEFORE_END, eval_cadence, save_cadence, seconds
from rlexp.config.schema.data import ArithmeticDataConfig, RowsDataConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import check_sources, has_held_out
from rlexp.config.schema.models import HFModelConfig, ModelConfig, TinyModelConfig
from rlexp.config.schema.rollouts import RolloutEngine, RolloutMode
from rlexp.config.vllm_memory import check_vllm_memory

MOST_RANKS = 512  # on one machine
OPTIONAL_LOGGERS = (LoggerName.tensorboard, LoggerName.trackio)  # also the names of packages and extras
MOST_SHARING = 64  # as the schema bounds launch.ranks_per_gpu
RECOMPUTED = [each.name for each in Checkpointing]

RULES = (
    Check("launch.ranks_per_gpu", lambda cfg: cfg.launch.device is Device.cpu and cfg.launch.ranks_per_gpu > 1,
          "is for GPUs, and launch.device=cpu. Leave it out: on CPU launch.nproc={launch.nproc} alone starts so many "
          "ranks."),
    Check("launch.collectives",
          lambda cfg: cfg.launch.device is Device.cpu and cfg.launch.collectives is Collectives.nccl,
          "NCCL carries tensors of GPUs, and launch.device=cpu. Leave it out."),
    Check("launch.collectives",
          lambda cfg: cfg.launch.ranks_per_gpu > 1 and cfg.launch.collectives is Collectives.nccl,
          "NCCL refuses two ranks on one GPU, and launch.ranks_per_gpu={launch.ranks_per_gpu}. Leave "
          "launch.collectives out, which takes staged, or use launch.ranks_per_gpu=1."),
    Check("launch.collectives",
          lambda cfg: cfg.launch.device is not Device.cpu and cfg.launch.collectives is Collectives.gloo,
          "gloo carries tensors of CPUs. On GPUs use launch.collectives=staged, which copies them to the host for "
          "gloo, or leave it out."),
    Check("optim.warmup_ratio", lambda cfg: cfg.optim.warmup_ratio is not None and cfg.optim.warmup_steps,
          "optim.warmup_steps={optim.warmup_steps} says how long the warm-up is, too. Give optim.warmup_steps=0 or "
          "optim.warmup_ratio=null."),
    Check("optim.warmup_start",
          lambda cfg: cfg.optim.warmup_start is not None and not cfg.optim.warmup_steps and not cfg.optim.warmup_ratio,
          "there is no warm-up that it could begin. Give optim.warmup_steps=N or optim.warmup_ratio=0.1, or leave it "
          "out."),
    Check("optim.min_lr_ratio",
          lambda cfg: cfg.optim.min_lr_ratio and cfg.optim.decay not in (Decay.linear, Decay.cosine),
          "is where optim.decay=linear or optim.decay=cosine end, and optim.decay={optim.decay.value} ends nowhere. "
          "Leave it out, or use one of the two."),
    Check("optim.betas", lambda cfg: len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas),
          "must be two numbers, each at least 0 and less than 1. For example: optim.betas=[0.9,0.999]."),
    Check("checkpoint.keep_best",
          lambda cfg: cfg.checkpoint.keep_best and cfg.train.eval_every is None
          and cfg.checkpoint.best_metric.startswith("eval/"),
          "keeps by checkpoint.best_metric={checkpoint.best_metric}, which is never measured. Give train.eval_every=N, "
          "or a metric of training."),
    Check("train.stop_after", lambda cfg: cfg.train.stop_after is not None and not cfg.checkpoint.on_exit,
          "with checkpoint.on_exit=false what was trained would be lost. Leave checkpoint.on_exit=true."),
    Check("memory.checkpointing", lambda cfg: cfg.memory.checkpointing not in (*RECOMPUTED, True, False),
          f"must be one of {', '.join(RECOMPUTED)} (true is full, false is none). For example: "
          "memory.checkpointing=attention."),
    Check("hardware.memory_gib",
          lambda cfg: 0 < cfg.hardware.memory_gib / cfg.launch.ranks_per_gpu <= cfg.hardware.reserve_gib
          and cfg.launch.ranks_per_gpu > 1,
          "launch.ranks_per_gpu={launch.ranks_per_gpu} gives each rank {each_gib:.3g} GiB of it, and "
          "hardware.reserve_gib={hardware.reserve_gib} leaves nothing of it. Give more memory, fewer ranks on a GPU, "
          "or a smaller reserve."),
    Check("hardware.memory_gib", lambda cfg: 0 < cfg.hardware.memory_gib <= cfg.hardware.reserve_gib,
          "hardware.reserve_gib={hardware.reserve_gib} leaves nothing of it. Give more memory, or a smaller reserve."),
    Check("logger.artifacts", lambda cfg: cfg.logger.artifacts and cfg.logger.name is not LoggerName.wandb,
          "is for W&B, and logger={logger.name.value} keeps none. Use logger=wandb."),
)  # fmt: skip
ALONE_HERE = (
    Check("launch.nproc", lambda cfg: cfg.launch.nproc > MOST_RANKS,
          f"one machine runs at most {MOST_RANKS} ranks. Use fewer."),
    Check("launch.nodes", lambda cfg: cfg.launch.nodes > 1,
          "this command starts ranks on this machine only. Start it on every node with torchrun or srun, or use "
          "hydra/launcher=slurm, or launch.nodes=1."),
)  # fmt: skip
ON_CLUSTER = (
    Check("resume.mode", lambda cfg: cfg.resume.mode == "never",
          "a job that Slurm starts again must continue its run. Leave resume.mode=auto; for a new run, give another "
          "hydra.sweep.dir=FOLDER."),
    Check("launch.time_limit",
          lambda cfg: seconds("launch.time_limit", cfg.launch.time_limit) < cfg.launch.grace_seconds + 2 * BEFORE_END,
          "ends before the first step, since a run starts to save launch.grace_seconds={launch.grace_seconds:g} plus "
          f"{BEFORE_END} s before its limit. Raise it, or lower launch.grace_seconds."),
)  # fmt: skip


def check(cfg: Config, *, here: bool = True, reads_rows: bool = True) -> None:
    """Refuse what cannot be run. With `here`, this machine runs it, and launch.device is resolved."""
    check_bounds(cfg)
    seconds("launch.time_limit", cfg.launch.time_limit)
    joined = here and sizes.joined_world() is not None
    if joined:
        _check_joined(cfg)
    else:
        refuse_broken(ALONE_HERE if here else ON_CLUSTER, cfg)
    if here:
        _check_gpus(cfg.launch, joined=joined)
    refuse_broken(RULES, cfg, each_gib=cfg.hardware.memory_gib / cfg.launch.ranks_per_gpu)
    save_cadence(cfg.checkpoint.save_every)
    check_micro_batches(cfg)
    _check_derived(cfg)
    check_engine(cfg)
    name = cfg.logger.name
    if here and name in OPTIONAL_LOGGERS and not installed(name.value):
        raise ConfigError(
            f"logger={name.value}: the package {name.value} is not installed. Install it with "
            f"`pip install -e '.[{name.value}]'` in a checkout, or use logger=wandb or logger=none."
        )
    if (baseline := cfg.logger.baseline) is not None:  # only the folder around it must exist: it may be about to begin
        folder = expanded("logger.baseline", baseline)
        if not os.path.isdir(folder.parent) or os.path.isfile(folder):
            raise ConfigError(f"logger.baseline={baseline}: no such run folder. Give another run's folder; relative "
                              f"paths start at {Path.cwd()}.")  # fmt: skip
    if isinstance(cfg.data, RowsDataConfig):
        check_sources(cfg.data, reads_rows=reads_rows)
    _check_model(cfg.model, here=here)
    heads = heads_of(cfg.model)
    check_backend(cfg, heads, here=here)
    check_layout(cfg, heads)
    if cfg.data.share_prefix:  # it is asked for
        refuse_broken(OF_SHARING, cfg)
    check_kernel(cfg, heads, here=here)
    check_adapter(cfg, here=here)
    check_reference(cfg, here=here)
    with_rope_settled(cfg)  # or refuse it
    check_vllm_memory(cfg)
    refuse_broken(OF_SAMPLES if cfg.loss.draws else WITHOUT_SAMPLES, cfg)
    if cfg.loss.draws and cfg.rollout.engine is RolloutEngine.vllm:
        check_vllm(cfg, here=here)
    check_loss(cfg)
    check_evaluation(cfg)
    check_reward(cfg)


def _check_joined(cfg: Config) -> None:
    """Refuse nodes, or ranks on each, that the launcher of this process has not started."""
    ranks, nodes = sizes.joined_world(), sizes.joined_nodes()
    assert ranks is not None
    if nodes is None:
        if ranks % cfg.launch.nodes:
            fitting = sizes.listed(sizes.nearest(cfg.launch.nodes, sizes.divisors(ranks)))
            raise ConfigError(
                f"launch.nodes={cfg.launch.nodes}: the launcher has started {ranks} ranks, and every node must have "
                f"equally many. Use launch.nodes={fitting}."
            )
        return
    torchrun = "RANK" in os.environ
    name, each = ("torchrun", "--nproc-per-node") if torchrun else ("srun", "--ntasks-per-node")
    for key, stated, started, option in (
        ("launch.nodes", cfg.launch.nodes, nodes, "--nnodes" if torchrun else "--nodes"),
        ("launch.nproc", cfg.launch.nproc, ranks // nodes, each),
    ):
        if stated != started:
            raise ConfigError(
                f"{key}={stated}: {name} has started {ranks} ranks, {ranks // nodes} on each of {nodes} "
                f"node{'s' * (nodes > 1)}. Use {key}={started}, or leave it out, or use {name} {option}={stated}."
            )
    # Ranks that srun has dealt to the nodes in turn: a ring's neighbours would lie on different nodes.
    on_each, rank, node = ranks // nodes, sizes.joined_rank(), sizes.joined_node()
    if cfg.parallel.ring_size > 1 and rank is not None and node not in (None, rank // on_each):
        raise ConfigError(
            f"parallel.ring_size={cfg.parallel.ring_size}: rank {rank} is on node {node}, and with {on_each} ranks on "
            f"each it must be on node {rank // on_each}: ranks that are neighbours in a ring share a node. Use srun "
            f"--distribution=block."
        )


def _check_gpus(launch: LaunchConfig, *, joined: bool) -> None:
    gpus, each = visible_gpus(), launch.ranks_per_gpu
    if launch.device is not Device.cuda or launch.nproc <= gpus * each or (joined and not _all_see(gpus)):
        return
    shared = -(-launch.nproc // gpus)
    held = "one GPU per rank" if each == 1 else f"launch.ranks_per_gpu={each} ranks on each GPU"
    share = f"; launch.ranks_per_gpu={shared} lets ranks share a GPU, which is slow" if shared <= MOST_SHARING else ""
    fewer = f"torchrun --nproc-per-node={gpus * each}" if joined else f"launch.nproc={gpus * each}"
    raise ConfigError(
        f"launch.nproc={launch.nproc}: {held}, and {gpus} {'is' if gpus == 1 else 'are'} visible. Use {fewer}, or "
        f"launch.device=cpu{share}."
    )


def _all_see(gpus: int) -> bool:
    """Say whether all ranks of this node see these same GPUs: torchrun gives its ranks one environment. A script of the
    user's that torchrun starts may show each rank one GPU, and Slurm may too."""
    return "LOCAL_WORLD_SIZE" in os.environ and (gpus > 1 or (gpus == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ))


def _check_derived(cfg: Config) -> None:
    """Refuse derived values that were set by hand: the run would report sizes that it does not have."""
    ranks = sizes.joined_world() or cfg.launch.nproc * cfg.launch.nodes
    world_size = sizes.training_ranks(ranks, cfg.rollout.sampling_ranks)
    dp_size = sizes.dp_size(world_size, cfg.parallel.ring_size)
    grad_acc = sizes.grad_acc(cfg.train.batch_size, cfg.train.micro_batch_size, dp_size)
    for key, value, derived, instead in (
        ("parallel.world_size", cfg.parallel.world_size, world_size, "launch.nproc"),
        ("parallel.dp_size", cfg.parallel.dp_size, dp_size, "launch.nproc or parallel.ring_size"),
        ("train.grad_acc", cfg.train.grad_acc, grad_acc, "train.micro_batch_size"),
        ("rollout.minibatches", cfg.rollout.minibatches, minibatches(cfg), "rollout.batch_size or train.batch_size"),
    ):
        if value != derived:
            if derived is None:
                raise ConfigError(
                    f"{key}={value}: is derived, and with train.micro_batch_size=auto each step has its own. Leave it "
                    f"out, or set train.micro_batch_size=NUMBER."
                )
            raise ConfigError(f"{key}={value}: is derived, and comes to {derived}. Set {instead} instead.")


def check_engine(cfg: Config) -> None:
    name, precision, offload = cfg.engine.name.value, cfg.train.precision.value, cfg.engine.offload.value
    traits = ENGINES[name]
    if precision not in traits.precisions:
        able = engine_facts.able(lambda other: precision in other.precisions)
        raise ConfigError(
            f"engine={name}: with train.precision={precision} DeepSpeed would keep float32 masters. Use {able}, or "
            f"train.precision=fp32. Without engine=, the run takes engine={engine_facts.default(precision)}."
        )
    if offload not in traits.offload:
        able = engine_facts.able(lambda other: offload in other.offload)
        raise ConfigError(f"engine.offload={offload}: engine={name} cannot. Use {able}, or engine.offload=none.")
    if cfg.engine.overrides and traits.stage is None:
        able = engine_facts.able(lambda other: other.stage is not None)
        raise ConfigError(
            f"engine.overrides={cfg.engine.overrides}: holds keys of DeepSpeed, and engine={name} is not DeepSpeed. "
            f"Use {able}, or leave engine.overrides out."
        )
    check_overrides(cfg.engine.overrides)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_model(model: ModelConfig, *, here: bool) -> None:
    match model:
        case TinyModelConfig(heads=heads, kv_heads=kv_heads, hidden_size=hidden_size):
            if heads % kv_heads:
                raise ConfigError(
                    f"model.kv_heads={kv_heads}: must divide model.heads={heads}. Use "
                    f"model.kv_heads={sizes.listed(sizes.nearest(kv_heads, sizes.divisors(heads)))}."
                )
            if hidden_size % heads or hidden_size // heads % 2:
                even = [each for each in (hidden_size // heads // 2 * 2, hidden_size // heads // 2 * 2 + 2) if each]
                raise ConfigError(
                    f"model.hidden_size={hidden_size}: must be an even multiple of model.heads={heads} "
                    f"(rotary positions turn pairs of channels). Use "
                    f"model.hidden_size={sizes.listed([heads * each for each in even])}."
                )
        case HFModelConfig():
            check_pretrained(model, here=here)


def check_evaluation(cfg: Config) -> None:
    eval_cadence(cfg.train.eval_every)
    if cfg.train.eval_every is not None:
        refuse_nothing_held_out(cfg, f"train.eval_every={cfg.train.eval_every}", "leave train.eval_every out")
    if cfg.eval.before_training:
        refuse_nothing_held_out(cfg, "eval.before_training=true", "leave it out")
    bounds = cfg.eval.buckets
    setting = f"eval.buckets=[{','.join(map(str, bounds))}]"
    if bounds and (min(bounds) < 1 or any(one >= other for one, other in itertools.pairwise(bounds))):
        fit = sorted({each for each in bounds if each > 0}) or [512, 2048]
        raise ConfigError(
            f"{setting}: must be numbers of tokens that ascend, each at least 1. Use eval.buckets="
            f"[{','.join(map(str, fit))}]."
        )
    if bounds and cfg.loss.draws:
        raise ConfigError(
            f"{setting}: divides answers that the rows give, and loss={cfg.loss.name} generates its own. Leave it out."
        )


def refuse_nothing_held_out(cfg: Config, asked: str, otherwise: str) -> None:
    match cfg.data:
        case RowsDataConfig() as rows:
            held_out = has_held_out(rows)
        case SyntheticDataConfig(eval_size=size) | ArithmeticDataConfig(eval_size=size):
            held_out = size > 0
        case _:
            held_out = False
    if not held_out:
        raise ConfigError(
            f"{asked}: there is no held-out data. Give data.eval_path=FILE, data.eval_split=NAME (data=hf) or "
            f"data.eval_size=N, or {otherwise}."
        )


def _pipelined(cfg: Config) -> bool:
    return cfg.rollout.mode is RolloutMode.pipelined


WITHOUT_SAMPLES = (
    Check("data", lambda cfg: isinstance(cfg.data, ArithmeticDataConfig),
          "has prompts and no answers, and loss={loss.name} is trained on answers. Use data=synthetic or data=jsonl, "
          "or a loss that generates its own samples (loss=ppo, loss=grpo, …)."),
    Check("rollout.mode", lambda cfg: cfg.rollout.sampling_ranks or _pipelined(cfg),
          "loss={loss.name} generates no samples. Leave it out, or use a loss that does (loss=ppo, loss=grpo, …)."),
)  # fmt: skip
OF_SAMPLES = (
    Check("rollout.stop", lambda cfg: "" in cfg.rollout.stop,
          "has an empty text, which would end every answer. Leave it out."),
    Check("rollout.max_new_tokens", lambda cfg: cfg.rollout.max_new_tokens >= cfg.data.max_length,
          "leaves no room for a prompt in data.max_length={data.max_length}, which counts both. Raise data.max_length, "
          "or lower rollout.max_new_tokens."),
    Check("rollout.micro_batch_tokens",
          lambda cfg: cfg.rollout.micro_batch_tokens and cfg.rollout.micro_batch_tokens < cfg.data.max_length,
          "must hold one sample at least, and data.max_length={data.max_length}. Raise the first, or lower the "
          "second."),
    Check("rollout.sampling_ranks", lambda cfg: _pipelined(cfg) and not cfg.rollout.sampling_ranks,
          "rollout.mode=pipelined needs at least 1 rank that only samples. Use rollout.sampling_ranks=1, or "
          "rollout.mode=colocated."),
    Check("rollout.sampling_ranks", lambda cfg: not _pipelined(cfg) and cfg.rollout.sampling_ranks,
          "rollout.mode={rollout.mode.value} needs all ranks to sample and to train. Use rollout.sampling_ranks=0, or "
          "rollout.mode=pipelined."),
    Check("checkpoint.best_metric",
          lambda cfg: cfg.checkpoint.keep_best and cfg.checkpoint.best_metric == "eval/loss",
          "loss={loss.name} has no loss on held-out prompts, so there is no best. Use "
          "checkpoint.best_metric=eval/objective/scores with checkpoint.best=max."),
    Check("data.drop_last", lambda cfg: not cfg.data.drop_last,
          "a rollout always has rollout.batch_size prompts. Leave data.drop_last=true, and choose rollout.batch_size "
          "so that it divides the number of prompts."),
)  # fmt: skip


def minibatches(cfg: Config) -> int:
    if not cfg.loss.draws:
        return 1
    return sizes.minibatches(cfg.rollout.batch_size, cfg.rollout.n_samples, cfg.train.batch_size)
