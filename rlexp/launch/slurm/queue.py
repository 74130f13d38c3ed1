"""Ask Slurm about jobs: its queue, and its accounting where there is one. A missing answer is never guessed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
