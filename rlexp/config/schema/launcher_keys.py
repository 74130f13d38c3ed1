"""The keys of our launchers: those of submitit and Hydra, and some that a site or a long run needs.

Submitit's own are declared again where they say nothing of what they do. Their defaults are submitit's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import MISSING

from rlexp.config.schema.bounds import number


@dataclass
class Jobs(BaseQueueConf):
    """Keys that both launchers share."""

    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"  # folder of submitit's files and the jobs' logs
    timeout_min: int = 60  # time limit of a job, minutes
    cpus_per_task: int | None = None  # processors of each rank
    gpus_per_node: int | None = None  # GPUs of each node; null: none
    tasks_per_node: int = 1  # processes that start on each node; with slurm, set `launch.nproc` instead
    mem_gb: float | None = None  # memory of each node, GB; null: the cluster's default
    nodes: int = 1  # nodes of a job; with slurm, set `launch.nodes` instead
    name: str = "${hydra.job.name}"  # name of the jobs
    stderr_to_stdout: bool = False  # one log for both streams


@dataclass
class SlurmJobs(SlurmQueueConf, Jobs):
    _target_: str = "hydra_plugins.rlexp.SlurmLauncher"
    cpus_per_task: int = MISSING
    partition: str | None = None  # Slurm's partition; null: the cluster's default
    qos: str | None = None  # quality of service; null: the cluster's default
    comment: str | None = None  # must be null: rlexp finds its jobs in the queue by a comment of its own
    constraint: str | None = None  # features that the nodes must have
    exclude: str | None = None  # nodes that must not be used
    gres: str | None = None  # generic resources, as sbatch's --gres
    cpus_per_gpu: int | None = None  # processors for each GPU
    gpus_per_task: int | None = None  # GPUs of each rank
    mem_per_gpu: str | None = None  # memory for each GPU, as 80G
    mem_per_cpu: str | None = None  # memory for each processor, as 4G
    account: str | None = None  # the account that is charged; null: the user's default
    signal_delay_s: int = 120  # seconds before the time limit at which Slurm asks the job to stop
    max_num_timeout: int = 0  # must be 0: rlexp continues a job after its time limit as often as needed
    # other options of sbatch: `{exclusive: true, mail-type: FAIL}`
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    array_parallelism: int = number(256, least=1)  # jobs of a sweep that run at once
    setup: list[str] | None = None  # lines of shell that run before the ranks start
    # restarts after a rank hung or was killed from outside; requeues and lost nodes do not count
    retries: int = number(0, least=0)
    dry_run: bool = False  # print the batch scripts, and submit nothing; needs no Slurm
    poll_seconds: float = number(10.0, above=0)  # seconds between two queries of the queue, for all jobs together
    modules: list[str] = field(default_factory=list)  # modules that `module load` loads before the ranks start
    environment: dict[str, str] = field(default_factory=dict)  # variables that every rank gets: `{NCCL_IB_HCA: mlx5}`
    container: str | None = None  # command before a rank's python: `apptainer exec --nv IMAGE`; null: no container
    python: str | None = None  # a rank's Python; null: this command's own, or `python` in a container
    # network interface that the nodes share, for gloo and NCCL; null: the one that reaches the other nodes
    interface: str | None = None
    srun_args: list[str] = field(default_factory=list)  # options of srun: `['--cpu-bind=cores']`


@dataclass
class LocalJobs(LocalQueueConf, Jobs):
    _target_: str = "hydra_plugins.rlexp.SlurmLocalLauncher"
    jobs_at_once: int = number(1, least=1)  # jobs of a sweep that run at once
    poll_seconds: float = number(0.5, above=0)  # seconds between two looks at the jobs


def register() -> None:
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="rlexp_slurm", node=SlurmJobs(), provider="rlexp")
    store.store(group="hydra/launcher", name="rlexp_slurm_local", node=LocalJobs(), provider="rlexp")
