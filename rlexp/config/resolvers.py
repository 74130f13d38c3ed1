"""The OmegaConf resolvers: thin names for pure functions, so that `--cfg job --resolve` shows derived values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from rlexp import engines
from rlexp.config import sizes
from rlexp.config.cadence import BEFORE_END, seconds
from rlexp.config.hardware import visible_gpus
from rlexp.config.paths import config_root
from rlexp.config.schema import KINDS, LossConfig, PolicyLossConfig
from rlexp.errors import ConfigError


def resolve_device(device: str) -> str:
    """`auto` is the GPUs where there are any; a GPU that was asked for and is not there is an error."""
    device = getattr(device, "value", device)
    if device == "cuda" and visible_gpus() == 0:
        raise ConfigError("launch.device=cuda: no GPU is visible on this machine. Use launch.device=cpu, or auto.")
    if device == "auto":
        return "cuda" if visible_gpus() else "cpu"
    return device


def default_nproc(device: str, ring_size: int, sampling_ranks: int) -> int:
    """Ranks on this machine: its GPUs, or on CPU one replica and who samples for it."""
    sizes.positive("parallel.ring_size", ring_size)
    if getattr(device, "value", device) == "cuda" and visible_gpus() == 0:
        raise ConfigError(
            "launch.device=cuda: no GPU is visible on this machine. Use launch.device=cpu, or auto; for a cluster, say "
            "how many each of its nodes has: launch.nproc=8."
        )
    return visible_gpus() if resolve_device(device) == "cuda" else ring_size + sampling_ranks


def default_precision(device: str) -> str:
    """A GPU's that is asked for, though it may be another machine's."""
    return "bf16" if getattr(device, "value", device) == "cuda" or resolve_device(device) == "cuda" else "fp32"


def default_engine(precision: str) -> str:
    return engines.default(getattr(precision, "value", precision))


def slurm_gpus(device: str, nproc: int) -> int | None:
    """GPUs to ask Slurm for on each node. The submitting machine may have none, so only `cpu` means none."""
    return None if getattr(device, "value", device) == "cpu" else nproc


def slurm_minutes(time_limit: str) -> int:
    return max(1, math.ceil(seconds("launch.time_limit", time_limit) / 60))


def slurm_memory(rank_memory_gb: float | None, nproc: int) -> float | None:
    return None if rank_memory_gb is None else rank_memory_gb * nproc


def slurm_warning(grace_seconds: float) -> int:
    """How long before its end a job is told: a step is finished and saved within the grace, and Slurm is not exact."""
    return math.ceil(grace_seconds) + BEFORE_END


def all_ranks(nproc: int, nodes: int) -> int:
    joined = sizes.joined_world()
    if joined is not None:
        return joined
    sizes.positive("launch.nproc", nproc)
    sizes.positive("launch.nodes", nodes)
    return nproc * nodes


def world_size(nproc: int, nodes: int, sampling_ranks: int) -> int:
    """The ranks that train."""
    return sizes.training_ranks(all_ranks(nproc, nodes), sampling_ranks)


def default_sampling_ranks(mode: str) -> int:
    return 1 if getattr(mode, "value", mode) == "pipelined" else 0


def default_importance_cap(mode: str) -> float | None:
    """Samples that are a step behind are weighed by how likely they are now; this bounds what one can weigh."""
    return 2.0 if getattr(mode, "value", mode) == "pipelined" else None


def minibatches(loss: str, batch_size: int, n_samples: int, train_batch: int) -> int:
    """Train batches of a rollout; 1 where the loss draws no samples."""
    if not issubclass(KINDS["loss"].get(loss, LossConfig), PolicyLossConfig):
        return 1
    return sizes.minibatches(batch_size, n_samples, train_batch)


def groups() -> str:
    """The groups and their options, for --help."""
    root = config_root()
    folders = {folder.name: folder for folder in sorted((root / "conf").iterdir()) if folder.is_dir()}
    folders["+experiment"] = folders.pop("experiment")
    folders |= {"+sweep": root / "sweeps" / "sweep", "hydra/launcher": root / "launchers" / "hydra" / "launcher"}
    return "\n".join(f"  {name}: {', '.join(sorted(p.stem for p in f.glob('*.yaml')))}" for name, f in folders.items())


def register() -> None:
    resolvers: dict[str, Callable[..., Any]] = {
        "rlexp_root": lambda: str(config_root()),
        "rlexp_groups": groups,
        "rlexp_nproc": default_nproc,
        "rlexp_precision": default_precision,
        "rlexp_engine": default_engine,
        "slurm_gpus": slurm_gpus,
        "slurm_memory": slurm_memory,
        "slurm_minutes": slurm_minutes,
        "slurm_warning": slurm_warning,
        "world_size": world_size,
        "dp_size": sizes.dp_size,
        "grad_acc": sizes.grad_acc,
        "minibatches": minibatches,
        "sampling_ranks": default_sampling_ranks,
        "importance_cap": default_importance_cap,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
