"""The keys of our launchers: those of submitit and Hydra, and some that a site or a long run needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
from omegaconf import MISSING

from rlexp.config.schema.bounds import number


@dataclass
class SlurmJobs(SlurmQueueConf):
    _target_: str = "hydra_plugins.rlexp.SlurmLauncher"
    cpus_per_task: int = MISSING
    mem_gb: float | None = None
    array_parallelism: int = number(256, least=1)
    retries: int = number(0, least=0)  # starts after a rank was killed from outside; not requeues, nor lost nodes
    dry_run: bool = False  # show the jobs, and submit nothing
    poll_seconds: float = number(10.0, above=0)  # between two queries of the queue, for all jobs together
    # For the site:
    modules: list[str] = field(default_factory=list)  # each is loaded with `module load`
    environment: dict[str, str] = field(default_factory=dict)
    container: str | None = None  # command before a rank's python: apptainer exec --nv IMAGE
    python: str | None = None  # a rank's Python; null: this command's own, or `python` in a container
    interface: str | None = None  # network interface that the nodes share
    srun_args: list[str] = field(default_factory=list)


@dataclass
class LocalJobs(LocalQueueConf):
    _target_: str = "hydra_plugins.rlexp.SlurmLocalLauncher"
    jobs_at_once: int = number(1, least=1)
    poll_seconds: float = number(0.5, above=0)


def register() -> None:
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="rlexp_slurm", node=SlurmJobs(), provider="rlexp")
    store.store(group="hydra/launcher", name="rlexp_slurm_local", node=LocalJobs(), provider="rlexp")
