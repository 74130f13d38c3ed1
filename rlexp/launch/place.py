"""A process's place in the world, and joining it."""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rlexp.config import sizes

if TYPE_CHECKING:  # it would import torch, which the launcher does without
    from rlexp.ring.bridge import Bridge


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where the ranks meet (`env://`, or a file on one machine)."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str

    @staticmethod
    def joined() -> Place | None:
        """The place that a launcher (torchrun, srun) gave this process."""
        world_size, rank = sizes.joined_world(), sizes.joined_rank()
        if world_size is None or rank is None:
            return None
        if "MASTER_ADDR" not in os.environ:
            _meet_in_step()
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        return Place(rank, world_size, local_rank, "env://")

    def export(self) -> None:
        """Libraries (DeepSpeed, W&B) read their place from the environment."""
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))


def _meet_in_step() -> None:
    """The ranks of a Slurm step meet on its first node, at a port that follows from job and step."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    class Step(SlurmJobEnvironment):
        """submitit reads the job's nodes; a step may have some of them only."""

        _env = SlurmJobEnvironment._env | {"nodes": "SLURM_STEP_NODELIST"}

    os.environ["MASTER_ADDR"] = Step().hostnames[0]
    step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    os.environ.setdefault("MASTER_PORT", str(random.Random(step).randint(20000, 60000)))


def prepare_environment(device: str, threads: int = 1) -> None:
    """What must stand in the environment before torch and DeepSpeed are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def join(place: Place, device: str, timeout_seconds: float, threads: int = 1, sampling: int = 0) -> Bridge | None:
    """Make this process a rank: threads, device, process group. With `sampling` ranks that do nothing else, the last,
    those that train have a world of their own, and a bridge leads from one to the other."""
    import torch
    import torch.distributed as dist

    from rlexp.ring import bridge

    timeout = timedelta(seconds=timeout_seconds)
    if device == "cuda":
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(threads)
        backend = "gloo"
        if place.init_method.startswith("file://") and os.path.isdir("/sys/class/net/lo"):
            # One machine: a host name that does not resolve must not keep the ranks apart.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, _, _ = next(dist.rendezvous(place.init_method, place.rank, place.world_size, timeout=timeout))
    training = place.world_size - sampling
    if place.rank < training:
        dataclasses.replace(place, world_size=training).export()
        dist.init_process_group(
            backend, store=dist.PrefixStore("training", store), rank=place.rank, world_size=training, timeout=timeout
        )
    return bridge.build(store, place.rank, training, sampling) if sampling else None
