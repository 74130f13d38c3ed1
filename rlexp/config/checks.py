"""Rules across fields, checked once, before a process is started."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from rlexp import engines
from rlexp.config import sizes
from rlexp.config.backend import check_backend
from rlexp.config.cadence import BEFORE_END, save_cadence, seconds
from rlexp.config.checks_policy import check_policy_loss
from rlexp.config.checks_rewards import check_reward
from rlexp.config.checks_rollout import check_rollout, minibatches
from rlexp.config.deepspeed import check_overrides
from rlexp.config.hardware import visible_gpus
from rlexp.config.kernels import check_kernel
from rlexp.config.layouts import choose, heads_of
from rlexp.config.resolvers import resolve_device
from rlexp.config.schema import (
    ArithmeticDataConfig,
    Config,
    Device,
    DPOConfig,
    HFModelConfig,
    JsonlDataConfig,
    LoggerName,
    SyntheticDataConfig,
    TinyModelConfig,
)
from rlexp.engines import ENGINES
from rlexp.errors import ConfigError, DataError

MOST_RANKS = 512  # on one machine
MOST_SECONDS = 7 * 24 * 3600


def check(cfg: Config, *, here: bool = True) -> None:
    if here:
        cfg.launch.device = Device[resolve_device(cfg.launch.device.value)]
        _check_launch(cfg)
    else:
        _check_cluster(cfg)
    _check_derived(cfg)
    _check_train(cfg)
    _check_engine(cfg)
    _check_checkpoints(cfg)
    _check_logger(cfg, here=here)
    _check_groups(cfg)
    heads = heads_of(cfg.model)
    check_backend(cfg, heads, here=here)
    choose(cfg, heads)
    check_kernel(cfg, heads, here=here)
    check_rollout(cfg)
    check_policy_loss(cfg)
    check_reward(cfg)


def _check_launch(cfg: Config) -> None:
    sizes.positive("launch.nodes", cfg.launch.nodes)
    sizes.positive("launch.torch_threads", cfg.launch.torch_threads)
    _positive("launch.timeout_seconds", cfg.launch.timeout_seconds)
    if cfg.launch.timeout_seconds > MOST_SECONDS:
        raise ConfigError(f"launch.timeout_seconds={cfg.launch.timeout_seconds}: must be at most {MOST_SECONDS}.")
    joined = sizes.joined_world() is not None
    if not joined and cfg.launch.nproc > MOST_RANKS:
        raise ConfigError(f"launch.nproc={cfg.launch.nproc}: one machine runs at most {MOST_RANKS} ranks.")
    if cfg.launch.nodes > 1 and not joined:
        raise ConfigError(
            f"launch.nodes={cfg.launch.nodes}: this command starts ranks on this machine only. Start it on every "
            f"node with torchrun or srun, or use hydra/launcher=slurm, or launch.nodes=1."
        )
    if cfg.launch.device is Device.cuda and not joined and cfg.launch.nproc > visible_gpus():
        raise ConfigError(
            f"launch.nproc={cfg.launch.nproc}: one GPU per rank, and {visible_gpus()} are visible. "
            f"Use launch.nproc={visible_gpus()}, or launch.device=cpu."
        )


def _check_cluster(cfg: Config) -> None:
    limit = seconds("launch.time_limit", cfg.launch.time_limit)
    sizes.positive("launch.rank_cpus", cfg.launch.rank_cpus)
    if cfg.launch.rank_memory_gb is not None:
        _positive("launch.rank_memory_gb", cfg.launch.rank_memory_gb)
    if cfg.resume.mode == "never":
        raise ConfigError(
            "resume.mode=never: a job that Slurm starts again goes on where it was. Leave resume.mode=auto, and give a "
            "folder of its own: hydra.sweep.dir=FOLDER."
        )
    if limit < cfg.launch.grace_seconds + 2 * BEFORE_END:
        raise ConfigError(
            f"launch.time_limit={cfg.launch.time_limit}: is over before a step is taken: a run begins to save "
            f"launch.grace_seconds={cfg.launch.grace_seconds:g} and {BEFORE_END} s before its end. Give it more, "
            f"or a smaller launch.grace_seconds."
        )


def _check_derived(cfg: Config) -> None:
    """Derived values may be looked at, not set: a run would report sizes it does not have."""
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
            raise ConfigError(f"{key}={value}: is derived, and comes to {derived}. Set {instead} instead.")


def _check_train(cfg: Config) -> None:
    if cfg.seed < 0:
        raise ConfigError(f"seed={cfg.seed}: must be at least 0.")
    for key in ("max_steps", "epochs", "eval_every", "stop_after"):
        value = getattr(cfg.train, key)
        if value is not None:
            sizes.positive(f"train.{key}", value)


def _check_engine(cfg: Config) -> None:
    name, precision, offload = cfg.engine.name.value, cfg.train.precision.value, cfg.engine.offload.value
    traits = ENGINES[name]
    if precision not in traits.precisions:
        able = engines.able(lambda other: precision in other.precisions)
        raise ConfigError(
            f"engine={name}: with train.precision={precision} DeepSpeed would keep float32 masters. Use {able}, or "
            f"train.precision=fp32. Without engine=, the run takes engine={engines.default(precision)}."
        )
    if offload not in traits.offload:
        able = engines.able(lambda other: offload in other.offload)
        raise ConfigError(f"engine.offload={offload}: engine={name} cannot. Use {able}, or engine.offload=none.")
    if cfg.engine.overrides and traits.stage is None:
        able = engines.able(lambda other: other.stage is not None)
        raise ConfigError(
            f"engine.overrides={cfg.engine.overrides}: holds keys of DeepSpeed, and engine={name} is not DeepSpeed. "
            f"Use {able}, or leave engine.overrides out."
        )
    check_overrides(cfg.engine.overrides)


def _check_checkpoints(cfg: Config) -> None:
    keep = cfg.checkpoint
    save_cadence(keep.save_every)
    _positive("launch.grace_seconds", cfg.launch.grace_seconds)
    if cfg.launch.grace_seconds > MOST_SECONDS:
        raise ConfigError(f"launch.grace_seconds={cfg.launch.grace_seconds}: must be at most {MOST_SECONDS}.")
    sizes.positive("checkpoint.keep_last", keep.keep_last)
    if keep.keep_best < 0:
        raise ConfigError(f"checkpoint.keep_best={keep.keep_best}: must be at least 0.")
    if keep.keep_best and keep.best_metric.startswith("eval/") and cfg.train.eval_every is None:
        raise ConfigError(
            f"checkpoint.keep_best={keep.keep_best}: keeps by checkpoint.best_metric={keep.best_metric}, which is "
            f"never measured. Give train.eval_every=N, or a metric of training."
        )
    if cfg.train.stop_after is not None and not keep.on_exit:
        raise ConfigError(
            f"train.stop_after={cfg.train.stop_after}: with checkpoint.on_exit=false what was trained would be lost. "
            f"Leave checkpoint.on_exit=true."
        )


OPTIONAL_LOGGERS = (LoggerName.tensorboard, LoggerName.trackio)  # named as their packages and our extras are


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_logger(cfg: Config, *, here: bool) -> None:
    name, baseline = cfg.logger.name, cfg.logger.baseline
    if here and name in OPTIONAL_LOGGERS and not installed(name.value):
        raise ConfigError(
            f"logger={name.value}: the package {name.value} is not installed. `pip install rlexp[{name.value}]`, or "
            f"use logger=wandb or logger=none."
        )
    if cfg.logger.artifacts and name is not LoggerName.wandb:
        raise ConfigError(f"logger.artifacts=true: is for W&B, and logger={name.value} keeps none. Use logger=wandb.")
    if baseline is None:
        return
    path = Path(baseline).expanduser()
    if not path.parent.is_dir() or (path.exists() and not path.is_dir()):  # the run itself may be about to begin
        raise ConfigError(
            f"logger.baseline={baseline}: no such run folder. Give another run's folder; relative paths start at "
            f"{Path.cwd()}."
        )


def _check_groups(cfg: Config) -> None:
    _positive("optim.lr", cfg.optim.lr, zero=True)
    _positive("optim.eps", cfg.optim.eps, zero=True)
    _positive("optim.weight_decay", cfg.optim.weight_decay, zero=True)
    _positive("optim.max_grad_norm", cfg.optim.max_grad_norm, zero=True)
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        raise ConfigError(f"optim.betas={cfg.optim.betas}: two values in [0, 1) are needed, as in [0.9,0.999].")
    if cfg.optim.warmup_steps < 0:
        raise ConfigError(f"optim.warmup_steps={cfg.optim.warmup_steps}: must be at least 0.")
    if cfg.data.max_length < 2:
        raise ConfigError(f"data.max_length={cfg.data.max_length}: must be at least 2 (a prompt and an answer).")
    match cfg.loss:
        case DPOConfig(beta=beta, label_smoothing=smoothing):
            _positive("loss.beta", beta)
            if not 0 <= smoothing < 0.5:
                raise ConfigError(f"loss.label_smoothing={smoothing}: must be in [0, 0.5).")
    match cfg.data:
        case JsonlDataConfig(path=path, eval_path=eval_path):
            _readable("data.path", path)
            if eval_path is not None:
                _readable("data.eval_path", eval_path)
        case SyntheticDataConfig(size=size, eval_size=eval_size) | ArithmeticDataConfig(size=size, eval_size=eval_size):
            sizes.positive("data.size", size)
            if eval_size < 0:
                raise ConfigError(f"data.eval_size={eval_size}: must be at least 0.")
    match cfg.model:
        case TinyModelConfig(heads=heads, kv_heads=kv_heads, hidden_size=hidden_size):
            for name in ("hidden_size", "intermediate_size", "layers"):
                sizes.positive(f"model.{name}", getattr(cfg.model, name))
            if heads < 1 or kv_heads < 1 or heads % kv_heads:
                raise ConfigError(f"model.kv_heads={kv_heads}: must divide model.heads={heads}.")
            if hidden_size % heads or hidden_size // heads % 2:
                raise ConfigError(
                    f"model.hidden_size={hidden_size}: must be an even multiple of model.heads={heads} "
                    f"(rotary positions turn pairs of channels)."
                )
        case HFModelConfig(path=path):
            looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
            if looks_local and not Path(path).expanduser().is_dir():
                raise ConfigError(f"model.path={path}: no such folder. Give a model's folder, or a hub name.")
    if cfg.train.eval_every is not None and not _has_eval(cfg):
        raise ConfigError(
            f"train.eval_every={cfg.train.eval_every}: there is no held-out data. "
            f"Give data.eval_path=FILE (jsonl) or data.eval_size (synthetic), or leave train.eval_every out."
        )


def _has_eval(cfg: Config) -> bool:
    match cfg.data:
        case JsonlDataConfig(eval_path=path):
            return path is not None
        case SyntheticDataConfig(eval_size=size) | ArithmeticDataConfig(eval_size=size):
            return size > 0
    return False


def _positive(key: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{key}={value}: must be {'at least' if zero else 'greater than'} 0.")


def _readable(key: str, path: str) -> None:
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{key}={path}: is a folder. Give a file with one JSON object per line.")
    if not file.is_file():
        raise DataError(f"{key}={path}: no such file. Relative paths start at {Path.cwd()}.")
