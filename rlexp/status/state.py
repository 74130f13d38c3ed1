"""Find a job's state and the reason, from its run's folder, its sweep's ledger, its processes, and Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlexp.compare.runs import LIVE
from rlexp.compare.table import brief
from rlexp.launch.slurm.queue import Known
from rlexp.launch.submitting import queued_again
from rlexp.launch.sweep import Job

LOST = "lost"  # its run says `running`, or was about to start, and nothing runs it
ILL = ("failed", LOST)
WELL = ("finished", *LIVE)
# Slurm's states of a job that has its nodes.
AT_WORK = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
ENDS = {
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was reached",
    "NODE_FAIL": "one of its nodes was lost",
    "BOOT_FAIL": "one of its nodes did not start",
    "OUT_OF_MEMORY": "it took more memory than it was given",
    "PREEMPTED": "a job of higher priority took its nodes",
    "CANCELLED": "it was cancelled",
    "REVOKED": "it was revoked",
}


@dataclass(frozen=True)
class Evidence:
    """What is known about a job."""

    folder: Path
    label: str = ""
    known: dict[str, Any] = field(default_factory=dict)  # run.json
    lives: bool | None = None  # whether the run's processes live; None: cannot be seen
    job: Job | None = None  # its entry in the sweep's ledger
    sweeps: bool | None = None  # whether the sweep's launcher lives
    job_id: str | None = None  # Slurm's
    slurm: Known | None = None
    answered: bool = False  # whether Slurm answered, even if it does not know the job

    @property
    def status(self) -> str | None:
        return self.known.get("status")


def state_of(seen: Evidence) -> tuple[str, str]:
    """Return the state, in the comparison's words, and the reason, which is empty for a job that does well."""
    state, why = _without_slurms_reason(seen)
    if seen.slurm is not None and seen.slurm.state in ENDS and state in ("failed", "stopped"):
        why = f"{why.rstrip('.')}. {by_slurm(seen.slurm)}" if why else by_slurm(seen.slurm)
    return state, why


def _without_slurms_reason(seen: Evidence) -> tuple[str, str]:
    status, job, slurm = seen.status, seen.job, seen.slurm
    if status == "finished" or (status == "running" and seen.lives):
        return status, ""
    if slurm is not None and slurm.alive and not _has_left(seen, slurm):
        return _alive_in_slurm(slurm)
    if job is not None and job.status in ("skipped", "failed"):
        return job.status, legible(job.reason)
    if job is not None and job.status == "waiting" and seen.sweeps is not False:
        return "waiting", ""
    if status == "running":
        gone = _gone(seen)
        return (LOST, gone) if gone else ("running", "")
    if queued_again(seen.known) and seen.answered and (slurm is None or not slurm.alive):
        return LOST, f"Slurm was to start it again, and does not. {by_slurm(slurm) if slurm else ''}".strip()
    if status is not None:
        return str(status), legible(seen.known.get("reason"))
    return _not_begun(seen)


def _has_left(seen: Evidence, slurm: Known) -> bool:
    """Whether the run has ended although its Slurm job goes on: the job is ending, or does something else now."""
    if slurm.state == "COMPLETING":
        return seen.status in ("failed", "stopped")
    own = seen.job is not None and seen.job.job_id == seen.job_id  # the Slurm job serves this run alone
    return slurm.state in AT_WORK and not own and (seen.lives is False or seen.status != "running")


def _alive_in_slurm(slurm: Known) -> tuple[str, str]:
    if slurm.hopeless:
        release = f", and `scontrol release {slurm.job}` releases it" if "held" in slurm.reason.lower() else ""
        return "waiting", (
            f"Slurm will not start it ({slurm.reason}), however long it waits. `scancel {slurm.job}` removes it from "
            f"the queue{release}."
        )
    return "running" if slurm.state in AT_WORK else "waiting", ""


def _gone(seen: Evidence) -> str:
    """Say why a run that says `running` does not run; empty if it may run."""
    if seen.slurm is not None and not seen.slurm.alive:
        return by_slurm(seen.slurm)
    if seen.lives is False:
        process = f"its process ({seen.known.get('pid')} on {seen.known.get('host')}) is gone"
        return f"{process}; the same command resumes it."
    if seen.job_id is not None and seen.answered and seen.slurm is None:
        return f"Slurm no longer knows job {seen.job_id}, and the run did not say how it ended."
    return ""


def _not_begun(seen: Evidence) -> tuple[str, str]:
    """Return the state of a job whose run.json is missing or cannot be read."""
    job, slurm = seen.job, seen.slurm
    if slurm is not None and not slurm.alive:
        return LOST, by_slurm(slurm)
    if seen.job_id is not None and seen.answered and slurm is None:
        return LOST, f"Slurm no longer knows job {seen.job_id}, and it left no run."
    if job is None:
        path = seen.folder / "run.json"
        return "stopped", f"{path}: is missing or cannot be read, so how the run ended is not known."
    if job.status not in LIVE:
        return job.status, legible(job.reason)
    if seen.job_id is None and seen.sweeps is False:
        return "stopped", "its sweep was stopped before this job; the same command resumes it"
    return job.status, ""


def by_slurm(slurm: Known) -> str:
    """`Slurm says TIMEOUT: its time limit was reached.`"""
    code = f", exit code {slurm.exit_code}" if slurm.exit_code not in ("", "0:0") else ""
    words = ENDS.get(slurm.state, f"its script ended, and the run did not say how{code}")
    return f"Slurm says {slurm.state}: {words}."


def legible(reason: str | None) -> str:
    """Return the error without its traceback, and the path of its log."""
    text = (reason or "").strip()
    error = " ".join(brief(text).split())
    logs = [line.strip() for line in text.splitlines() if line.startswith("Its log:")]
    return " ".join([error, *(f"{log}." for log in logs if log not in error)])
