"""Launchers that submit jobs and wait for them. They never start a running job again, and take a job's outcome from
its run's folder, not from submitit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf

from rlexp.launch import preflight_check, run_folder
from rlexp.launch.local import report_here
from rlexp.launch.planning import Planned, SweepLauncher, done, refuse, say_how
from rlexp.launch.rank_reports import read_verdict
from rlexp.launch.slurm.queue import Known, Silent
from rlexp.launch.slurm.verdict import AGAIN
from rlexp.launch.stops import Terminated, cause_of, hear_stops
from rlexp.launch.sweep import Job, Sweep

SURE = 2  # answers in a row that a job is over, since a queue may miss a job that is being requeued
REFUSED = "REFUSED"  # state of a job that ended before its run began


class Submitting(BaseSubmititLauncher, SweepLauncher):
    """Jobs not yet submitted are in `self.waiting`; submitted jobs are in `self.running`, by their cluster id."""

    checked_here = False

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        sweep = self.open()
        jobs = self.plan(sweep, job_overrides, initial_job_idx)
        self.prepare(jobs)
        self.waiting: list[Planned] = []
        self.running: dict[str, Planned] = {}
        for planned in jobs:
            if planned.refusal is not None:
                refuse(sweep, planned.job, planned.refusal)
            elif not finished(sweep, planned.job):
                handed(sweep, planned)
                self.waiting.append(planned)
        self._adopt(sweep)
        try:
            self._run(sweep)
        except KeyboardInterrupt:
            sys.stderr.write(f"\nrlexp: {self.left_behind([*self.running])}\n")
            raise
        return [done() for _ in jobs]

    # Implemented for each kind of cluster:

    def prepare(self, jobs: Sequence[Planned]) -> None:
        """Refuse jobs that the cluster could never run."""

    def room(self) -> int:
        """Return how many more jobs may be submitted now."""
        raise NotImplementedError

    def submit(self, sweep: Sweep, jobs: Sequence[Planned]) -> dict[str, Planned]:
        raise NotImplementedError

    def look(self, jobs: Sequence[str]) -> Mapping[str, Known]:
        """Return what the cluster knows of submitted jobs. May raise Silent."""
        raise NotImplementedError

    def recall(self, job: str) -> Known | None:
        """Return what the cluster knows of a job that is over."""
        raise NotImplementedError

    def recover(self, planned: Planned) -> str | None:
        """Return the id of a job that an earlier launcher submitted but could not record; None if there is none."""
        raise NotImplementedError

    def withdraw(self, job: str) -> None:
        """Cancel a job that would wait for ever."""
        raise NotImplementedError

    def left_behind(self, jobs: Sequence[str]) -> str:
        raise NotImplementedError

    # Shared:

    def _adopt(self, sweep: Sweep) -> None:
        """Adopt jobs of an earlier launcher that are still alive."""
        ids = {job_id: planned for planned in self.waiting if (job_id := planned.job.job_id or self.recover(planned))}
        known: dict[str, Known] = {}
        for _ in range(SURE if ids else 0):
            known |= {job: state for job, state in self.look([*ids]).items() if state.alive}
            if len(known) < len(ids):
                time.sleep(float(self.params["poll_seconds"]))
        for job_id, planned in ids.items():
            if job_id in known:
                self.waiting.remove(planned)
                self.running[job_id] = planned
                planned.job.job_id = job_id
                sweep.note(planned.job, "running", f"continues as job {job_id}")
                sys.stderr.write(f"{sweep.name}: {planned.job.label} is running already, as job {job_id}\n")

    def _run(self, sweep: Sweep) -> None:
        self.gone: dict[str, int] = {}  # answers in a row without the job
        self.barred: dict[str, int] = {}  # answers in a row by which it may never start
        self.warned: set[str] = set()
        while self.waiting or self.running:
            if self.waiting and (room := self.room()) > 0:
                some, self.waiting = self.waiting[:room], self.waiting[room:]
                self.running |= self.submit(sweep, some)
            else:
                time.sleep(float(self.params["poll_seconds"]))
                self._see(sweep)

    def _see(self, sweep: Sweep) -> None:
        """Look at the submitted jobs once and record those that are over. No answer changes nothing."""
        try:
            known = self.look([*self.running])
        except Silent as error:
            self._warn(f"{error} Asking again.")
            return
        for job_id, planned in [*self.running.items()]:
            state = known.get(job_id)
            if state is not None and state.hopeless:
                self._warn(f"{planned.job.label} waits as job {job_id} and cannot start: {state.reason}")
            self.barred[job_id] = self.barred.get(job_id, 0) + 1 if state is not None and state.forbidden else 0
            if state is not None and self.barred[job_id] >= SURE:
                del self.running[job_id]
                self.withdraw(job_id)
                refused = f"Slurm queued it as job {job_id}, but would never start it: {state.reason}"
                self._record_end(sweep, planned, Known(job_id, REFUSED, refused))
                continue
            self.gone[job_id] = 0 if state is not None and state.alive else self.gone.get(job_id, 0) + 1
            if self.gone[job_id] >= SURE:
                del self.running[job_id]
                self._record_end(sweep, planned, self.recall(job_id) or state)

    def _warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            sys.stderr.write(f"rlexp: {text}\n")

    def _record_end(self, sweep: Sweep, planned: Planned, known: Known | None) -> None:
        """Write how a job ended into the ledger. The run's own folder comes first: Slurm knows only an exit code."""
        job, where = planned.job, sweep.folder / planned.job.folder
        verdict = read_verdict(where, job.job_id)
        run = run_folder.read(where) if not verdict or queued_again(verdict) else verdict
        cancelled = known is not None and known.state == "CANCELLED"
        last = ("finished", "failed") if cancelled else ("finished", "failed", "stopped")
        predicted = preflight_check.read(where)
        if predicted is not None and predicted.fits is False and run.get("status") == "failed":
            job.predicted = predicted.peak  # the job could tell its GPUs, and this machine could not
            sweep.note(job, "skipped", str(run.get("reason")).partition("\n")[0])
        elif known is not None and known.state == REFUSED:
            sweep.note(job, "failed", known.reason)
        elif run.get("status") in last and not queued_again(run):
            sweep.note(job, run["status"], run.get("reason"))
        else:
            status, reason = self._without_a_word(job, known, begun=bool(run))
            sweep.note(job, status, reason)
            if run:  # else it says for ever that it runs, or will again
                run_folder.record_end(where, status=status, reason=reason)
        if job.status != "finished":
            say_how(job)

    def _without_a_word(self, job: Job, known: Known | None, *, begun: bool) -> tuple[str, str]:
        """Return status and reason of a job whose run recorded no end."""
        if known is not None and known.state == "CANCELLED":
            return "stopped", f"job {job.job_id} was cancelled{'' if begun else ' before it had begun'}"
        if known is None and not begun and not Path(self.log_of(job)).exists():
            # Slurm keeps no record of a task that was cancelled while its array waited.
            return "stopped", f"job {job.job_id} was cancelled before it had begun: there is no record of it"
        state = "there is no record of it" if known is None else f"its state is {known.state}"
        why = f" ({known.reason})" if known is not None and known.reason else ""
        ended = f"job {job.job_id} ended, and its run recorded no reason: {state}{why}"
        return "failed", f"{ended}\nIts log: {self.log_of(job)}"

    def log_of(self, job: Job) -> str:
        import submitit

        return str(submitit.core.utils.JobPaths(self.params["submitit_folder"], job_id=job.job_id, task_id=0).stderr)

    def arguments(self, planned: Planned) -> tuple[Any, ...]:
        """Return the arguments with which the job calls `__call__`."""
        job, state = planned.job, Singleton.get_state()
        return planned.overrides, "hydra.sweep.dir", job.number, f"job {job.number}", state

    def __call__(self, *args: Any) -> None:
        """Run the job on every rank. This replaces submitit's signal handlers, which would requeue the job while its
        ranks run, and raises the error that Hydra caught, so that the process does not exit with 0."""
        hear_stops(under_launcher=False)
        try:
            returned = super().__call__(*args)
            if returned.status is JobStatus.FAILED:
                raise returned._return_value
        except BaseException as error:
            if isinstance(stop := cause_of(error), Terminated):
                os._exit(stop.exit_code)
            if isinstance(error, Exception):
                report_here(error)
            raise


def queued_again(run: Mapping[str, Any]) -> bool:
    """Whether the end of this start says that Slurm starts the job again."""
    return run.get("status") == "stopped" and str(run.get("reason")).endswith(AGAIN)


def resources(planned: Planned) -> dict[str, Any]:
    """Return the resources that a job asks of the cluster, from its own configuration."""
    params = OmegaConf.to_container(planned.config.hydra.launcher, resolve=True)
    assert isinstance(params, dict)
    return {str(key): value for key, value in params.items()}


def handed(sweep: Sweep, planned: Planned) -> None:
    """Write what was predicted of a job into its run's folder, so that the job need not rehearse again."""
    if planned.decision.fits is not None:
        where = sweep.folder / planned.job.folder
        where.mkdir(parents=True, exist_ok=True)
        preflight_check.keep(where, planned.decision)


def finished(sweep: Sweep, job: Job) -> bool:
    """Whether the job's run is already finished. A finished job is recorded, and not submitted again."""
    run = run_folder.read(sweep.folder / job.folder)
    if run.get("status") != "finished":
        return False
    sweep.note(job, "finished", run.get("reason"))
    return True
