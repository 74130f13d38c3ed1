"""Ask Slurm about jobs and nodes: its queue, its accounting where there is one, and whether a job can ever start. A
missing answer is never guessed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.base.errors import ConfigError, UserError

PATIENCE = 60.0  # seconds that a Slurm command may take: a busy controller is slow
# States that a job may leave again. In all others it is over.
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "RESIZING",
         "SIGNALING", "SPECIAL_EXIT", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}  # fmt: skip
# Reasons for which a job waits until somebody changes something.
HOPELESS = {
    "PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "PartitionInactive",
    "InvalidAccount", "InvalidQOS", "BadConstraints", "DependencyNeverSatisfied", "JobHeldAdmin", "JobHeldUser",
    "AccountNotAllowed", "QOSNotAllowed", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit",
    "AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit", "AssocMaxGRESPerJob", "QOSMaxGRESPerJob",
    "AssocMaxCpuPerJobLimit", "QOSMaxCpuPerJobLimit", "launch_failed_requeued_held", "job_requeued_in_held_state",
    "launch failed requeued held", "job requeued in held state", "JobHoldMaxRequeue", "QOSMinGRES", "MaxMemPerLimit",
}  # fmt: skip
# The reasons among them that follow from what the job asks, so that only the user can change it. Slurm writes them as
# one word or as a sentence.
FORBIDDEN = {reason for reason in HOPELESS if re.search("Account|QOS|Assoc|PerJob", reason)}
_FORBIDDEN = re.compile(r"Job's (account|QOS) not (permitted|known)")


class Silent(UserError):
    """Slurm gave no answer. Nothing follows from it."""


@dataclass(frozen=True)
class Known:
    """What Slurm reports about a job."""

    job: str  # 12, or 12_3 in an array
    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, PREEMPTED, …
    reason: str = ""  # why the job waits or was ended
    seconds_left: float | None = None
    nodes: str = ""
    exit_code: str = ""  # code:signal, from accounting

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def hopeless(self) -> bool:
        return self.state == "PENDING" and (self.reason in HOPELESS or self.forbidden)

    @property
    def forbidden(self) -> bool:
        return self.state == "PENDING" and (self.reason in FORBIDDEN or bool(_FORBIDDEN.match(self.reason)))


def look(jobs: Sequence[str]) -> dict[str, Known]:
    """Return what the queue knows of these jobs. Jobs that ended lately are included, older ones missing."""
    if not jobs:
        return {}
    arrays = sorted({job.partition("_")[0] for job in jobs})
    text = ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(arrays)}",
               "--format=%i|%T|%r|%L|%N")  # fmt: skip
    queued = {}
    for line in text.splitlines():
        if line.count("|") >= 4:
            job, state, reason, left, nodes = line.split("|")[:5]
            seconds_left = seconds_of(left) if state == "RUNNING" else None
            queued[job] = Known(job, state, "" if reason == "None" else reason, seconds_left, nodes)
    return {job: known for job, known in queued.items() if job in jobs}


def recall(jobs: Sequence[str]) -> dict[str, Known]:
    """Return what accounting knows of these jobs; empty where there is no accounting."""
    if not jobs or shutil.which("sacct") is None:
        return {}
    try:
        text = ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}",
                   "--format=JobID,State,Reason,NodeList,ExitCode")  # fmt: skip
    except Silent:
        return {}
    accounted = {}
    for line in text.splitlines():
        job, state, reason, nodes, code = line.split("|")[:5]
        state, reason = state.split()[0].rstrip("+"), "" if reason == "None" else reason
        accounted[job] = Known(job, state, reason, nodes=nodes, exit_code=code)
    return {job: known for job, known in accounted.items() if job in jobs}


def needed() -> None:
    """Refuse to go on where Slurm's commands are missing."""
    for command in ("sbatch", "squeue", "sinfo"):
        if shutil.which(command) is None:
            raise ConfigError(
                f"hydra/launcher=slurm: there is no {command} on the path of this machine. Give the command on a login "
                f"node of the cluster, see what would be submitted with hydra.launcher.dry_run=true, or take "
                f"hydra/launcher=slurm_local, which needs no cluster."
            )


def named(comment: str) -> list[str]:
    """Return the jobs in the queue that were submitted with this comment."""
    text = ask("squeue", "--noheader", "--array", "--me", "--format=%i|%k")
    return [job for job, _, note in (line.partition("|") for line in text.splitlines()) if note.strip() == comment]


def seconds_of(text: str) -> float | None:
    """Read a duration as Slurm writes it: `1-02:03:04`, `02:03:04` or `03:04`. None for UNLIMITED and INVALID."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or not (days or "0").isdigit():
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds


def ask(command: str, *args: str, patience: float = PATIENCE) -> str:
    """Return the output of a Slurm command, with times in UTC. If Slurm no longer knows the job, the output is
    empty."""
    env = os.environ | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    try:
        answer = subprocess.run(
            [command, *args], capture_output=True, text=True, timeout=patience, check=False, env=env
        )
    except FileNotFoundError:
        raise Silent(f"{command}: is not on the path of this machine.") from None
    except subprocess.TimeoutExpired:
        raise Silent(f"{command}: gave no answer within {patience:g} s.") from None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise Silent(f"{' '.join([command, *args])}: {last_line(answer.stderr) or f'ended with {answer.returncode}'}")
    return answer.stdout


def last_line(text: str) -> str:
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    return next((line for line in reversed([*lines]) if line), "")


@dataclass(frozen=True)
class Partition:
    """A partition, or one of its kinds of node."""

    name: str
    default: bool
    seconds: float | None  # its time limit
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int


def partitions() -> list[Partition]:
    """Return one entry for each kind of node in each partition."""
    text = ask("sinfo", "--noheader", "--exact", "--format=%P|%l|%D|%c|%m|%G")
    return [partition_in(line) for line in text.splitlines() if line.count("|") >= 5]


def partition_in(line: str) -> Partition:
    name, limit, nodes, cpus, memory, gres = line.split("|")[:6]
    gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)*:(\d+)", gres))
    count, cores, mb = (int(re.sub(r"\D.*", "", number) or 0) for number in (nodes, cpus, memory))
    return Partition(name.rstrip("*"), name.endswith("*"), seconds_of(limit), count, cores, mb, gpus)


def kinds(all_partitions: Sequence[Partition], wanted: str | None) -> list[Partition]:
    """Return the kinds of node in the wanted partitions, or in the cluster's default partition."""
    names = names_of(wanted)
    return [each for each in all_partitions if (each.name in names if names else each.default)]


def names_of(wanted: str | None) -> list[str]:
    return [name.strip() for name in wanted.split(",")] if wanted else []


def exceeded(params: Mapping[str, Any], all_partitions: Sequence[Partition]) -> str | None:
    """Return why a job of this size would wait for ever, with the key to change; None if it fits."""
    wanted = params.get("partition")
    for name in names_of(wanted):
        if not any(each.name == name for each in all_partitions):
            return (
                f"hydra.launcher.partition={wanted}: this cluster has no partition {name}. It has "
                f"{', '.join(sorted({each.name for each in all_partitions}))}."
            )
    ours = kinds(all_partitions, wanted)
    if not ours:  # no default partition: sbatch will say so
        return None
    nodes: Counter[str] = Counter()  # of each partition, since a job runs in one
    for each in ours:
        nodes[each.name] += each.nodes
    where = f"partition {'/'.join(sorted(nodes))}"
    tasks = int(params["tasks_per_node"])
    gpus = params.get("gpus_per_node") or 0
    on_gpus = "launch.nproc={asked}" if gpus >= tasks else f"launch.nproc={tasks} on {{asked}} GPUs"  # ranks share them
    for asked, has, template in (
        (gpus, max(each.gpus for each in ours), on_gpus +
         ": no node of {where} has so many GPUs; the largest has {has}. Take fewer on more nodes "
         "(launch.nodes), another partition, or launch.device=cpu."),
        (tasks * int(params["cpus_per_task"]), max(each.cpus for each in ours),
         "launch.nproc × launch.rank_cpus={asked}: no node of {where} has so many processors; the largest has {has}. "
         "Take more nodes, or a smaller launch.rank_cpus."),
        (int((params.get("mem_gb") or 0) * 1024), max(each.memory_mb for each in ours),
         "launch.nproc × launch.rank_memory_gb: {asked} MB are more than a node of {where} has ({has} MB)."),
        (int(params["nodes"]), max(nodes.values()), "launch.nodes={asked}: {where} has {has} nodes."),
        (float(params["timeout_min"]) * 60, max(each.seconds or float("inf") for each in ours),
         "launch.time_limit: {asked:g} s are more than {where} allows ({has:g} s). Give less: a run that is not done "
         "then continues in the same job, started again."),
    ):  # fmt: skip
        if asked > has:
            return template.format(asked=asked, has=has, where=where)
    return None
