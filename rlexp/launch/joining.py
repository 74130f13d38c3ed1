"""A process's place in the world of ranks, and how it joins that world."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.hardware import TORCH_WITHOUT_CUDA
from rlexp.config.schema import Collectives, Device, LaunchConfig
from rlexp.launch import watch
from rlexp.launch.slurm.meeting import INTERFACES, meet

if TYPE_CHECKING:  # at run time it would import torch, which the launcher does not need
    import torch.distributed as dist

STEP = "slurm://"
ON_CPU = LaunchConfig(device=Device.cpu)


def launch_on(device: str, timeout_seconds: float, **more: Any) -> LaunchConfig:
    """Return how ranks start that no configuration describes."""
    return LaunchConfig(device=Device(device), nproc=1, timeout_seconds=timeout_seconds, **more)


@dataclass(frozen=True)
class RankSpec:
    """Which rank this process is, and where the ranks meet: `env://`, a file on one machine, or a Slurm step."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str

    @staticmethod
    def joined() -> RankSpec | None:
        """Return the place that a launcher (torchrun, srun) gave this process; None without one."""
        world_size, rank = sizes.joined_world(), sizes.joined_rank()
        if world_size is None or rank is None:
            return None
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        return RankSpec(rank, world_size, local_rank, "env://" if "MASTER_ADDR" in os.environ else STEP)

    def export(self) -> None:
        """Put the place into the environment, where libraries (DeepSpeed, W&B) read it."""
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))


def prepare_environment(launch: LaunchConfig) -> None:
    """Set the variables that torch, CUDA and DeepSpeed read when they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(launch)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if launch.device is Device.cuda:
        # Freed memory of one size then serves another: sequences of all lengths leave no holes.
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name, which a user may have set
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if launch.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def threads_of(launch: LaunchConfig) -> int:
    """Return the threads of a rank. Beside a GPU it has its share of the cores: an offloaded optimizer steps there."""
    if launch.device is not Device.cuda:
        return launch.torch_threads
    cores = len(os.sched_getaffinity(0))
    bound = os.environ.get("SLURM_CPUS_PER_TASK") == str(cores)  # Slurm has bound this rank to its own
    return max(launch.torch_threads, cores if bound else cores // launch.nproc)


def join(spec: RankSpec, launch: LaunchConfig, sampling: int = 0) -> dist.Store:
    """Make this process a rank: set threads and device, and open the process group. Return the store of all ranks.

    The last `sampling` ranks only sample, and have no process group: the ranks that train have a world of their own.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=launch.timeout_seconds)
    torch.set_num_threads(threads_of(launch))
    gpu: int | None = None
    if launch.device is Device.cuda:
        gpu = spec.local_rank // launch.ranks_per_gpu % gpus_of_torch()  # a site may show a rank only its own GPU
        torch.cuda.set_device(gpu)
        spec = dataclasses.replace(spec, local_rank=gpu)  # as DeepSpeed reads it: it takes LOCAL_RANK for the GPU
    if spec.init_method.startswith("file://") and os.path.isdir("/sys/class/net/lo"):
        # On one machine the ranks connect over loopback: nobody else can, and the host's name need not resolve.
        for name in INTERFACES:
            os.environ.setdefault(name, "lo")
    if spec.init_method == STEP:
        store = meet(spec.rank, spec.world_size, launch.timeout_seconds, launch.interface)
    else:
        store, _, _ = next(dist.rendezvous(spec.init_method, spec.rank, spec.world_size, timeout=timeout))
    watched = store
    with contextlib.suppress(
        AttributeError, RuntimeError
    ):  # an older torch has no clones, nor a store without a server
        watched = getattr(store, "clone")()  # noqa: B009 - a connection that no other call keeps busy
    watch.begin(dist.PrefixStore("watch", watched), spec.rank, spec.world_size, launch.timeout_seconds, gpu)
    store.set_timeout(watch.FOR_EVER)  # NCCL meets here when a group is first used
    training = spec.world_size - sampling
    if spec.rank < training:
        dataclasses.replace(spec, world_size=training).export()
        # Shim: give the groups that DeepSpeed makes the time that the others have. Remove this when a new group of
        # torch inherits it from the world's.
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(dist.distributed_c10d, name, watch.FOR_EVER)
        dist.init_process_group(
            backend_of(launch), store=dist.PrefixStore("training", store), rank=spec.rank, world_size=training,
            timeout=watch.FOR_EVER,
        )  # fmt: skip
    return store


def backend_of(launch: LaunchConfig) -> str:
    """Return what carries tensors between ranks, as torch names it."""
    match launch.carrier:
        case Collectives.staged:
            from rlexp.launch import staged

            return staged.register()
        case Collectives.gloo:
            return "gloo"
        case _:
            return "cpu:gloo,cuda:nccl"


def gpus_of_torch() -> int:
    """Return how many GPUs torch sees. It may see none where the driver shows some."""
    import torch

    if count := torch.cuda.device_count():
        return count
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(TORCH_WITHOUT_CUDA)
    raise ConfigError(
        f"launch.device=cuda: torch {torch.__version__} sees no GPU on {socket.gethostname()}. Its driver may be older "
        f"than this torch needs: `python -c 'import torch; torch.cuda.init()'` says why. Install a torch for that "
        f"driver (https://pytorch.org/get-started lists them), or use launch.device=cpu."
    )


def leave_world() -> None:
    """Leave the world together. A process that exits with an open process group sometimes aborts, because gloo's
    threads still free tensors after the interpreter is gone."""
    import torch.distributed as dist

    if dist.is_initialized():  # a rank that only samples has no process group, or is alone in it
        dist.barrier()
        watch.end()
        dist.destroy_process_group()
