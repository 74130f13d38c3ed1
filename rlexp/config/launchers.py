"""The keys of `hydra/launcher=slurm`: submitit's and Hydra's, and what a site or a long run needs besides."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
from omegaconf import MISSING


@dataclass
class SlurmJobs(SlurmQueueConf):
    _target_: str = "hydra_plugins.rlexp.SlurmLauncher"
    cpus_per_task: int = MISSING
    mem_gb: float | None = None
    retries: int = 0  # starts after a rank was killed from outside; requeues and lost nodes do not count
    dry_run: bool = False  # show what would be sent to Slurm, and send nothing
    poll_seconds: float = 10.0  # between two questions to Slurm's queue, for all jobs together
    # The site's:
    modules: list[str] = field(default_factory=list)  # `module load` of each
    environment: dict[str, str] = field(default_factory=dict)
    container: str | None = None  # what stands before the python of a rank: apptainer exec --nv IMAGE
    python: str | None = None  # a rank's; by default this command's own, or in a container `python`
    interface: str | None = None  # the network's that the nodes share
    srun_args: list[str] = field(default_factory=list)


@dataclass
class LocalJobs(LocalQueueConf):
    _target_: str = "hydra_plugins.rlexp.SlurmLocalLauncher"
    jobs_at_once: int = 1
    poll_seconds: float = 0.5


def register() -> None:
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="rlexp_slurm", node=SlurmJobs(), provider="rlexp")
    store.store(group="hydra/launcher", name="rlexp_slurm_local", node=LocalJobs(), provider="rlexp")
