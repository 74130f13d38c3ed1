"""rlexp's launchers for Hydra, registered under the names that `launchers/` uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import OmegaConf

from rlexp.config.schema.launcher_keys import LocalJobs
from rlexp.launch import run_folder
from rlexp.launch.local import Interrupted
from rlexp.launch.planning import SUBDIR, Planned, Refusal, SweepLauncher, done, refusal, refuse
from rlexp.launch.slurm import key_checks
from rlexp.launch.slurm.launcher import SlurmLauncher
from rlexp.launch.slurm.queue import Known
from rlexp.launch.submitting import REFUSED, Submitting, resources
from rlexp.launch.sweep import Sweep

_OWN = (
    "_target_",
    "submitit_folder",
    "jobs_at_once",
    "poll_seconds",
)  # keys of hydra/launcher=slurm_local, not its job's


class LocalLauncher(SweepLauncher):
    """Run one job after the other on this machine, each with its own ranks."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        sweep = self.open()
        jobs = self.plan(sweep, job_overrides, initial_job_idx)
        for place, planned in enumerate(jobs, 1):
            job = planned.job
            if planned.refusal is not None:
                refuse(sweep, job, planned.refusal)
                continue
            sys.stderr.write(f"\n{sweep.name} {place}/{len(jobs)}: {job.label}\n")
            sweep.note(job, "running")
            self._run(sweep, planned)
        return [done() for _ in jobs]

    def _run(self, sweep: Sweep, planned: Planned) -> None:
        """Run a job and write how it ended into the ledger. A failure is printed."""
        job, error, code = planned.job, None, None
        try:
            returned = run_job(
                hydra_context=self.hydra_context, task_function=self.task_function, config=planned.config,
                job_dir_key="hydra.sweep.dir", job_subdir_key=SUBDIR,
            )  # fmt: skip
            error = returned._return_value if returned.status is JobStatus.FAILED else None
        except SystemExit as left:
            code = left.code
        except Exception as raised:  # by Hydra, as for a folder that cannot be made: only this job fails
            error = raised
        finally:
            run_folder.leave(sweep.folder / job.folder)
        if error is not None:
            refuse(sweep, job, refusal(error) or Refusal("failed", f"{type(error).__name__}: {error}"))
            return
        run = run_folder.read(sweep.folder / job.folder)
        sweep.note(job, run.get("status", "failed"), run.get("reason"))
        if isinstance(code, int) and code > 128:
            raise Interrupted(code - 128)


class SlurmLocalLauncher(Submitting):
    """Run a sweep's jobs as processes on this machine, some at a time, without a cluster. As on a cluster, they go on
    when this command is killed."""

    checked_here = True

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with self.nothing_begun():
            key_checks.check(self.config.hydra.launcher, LocalJobs)
        self.handed: dict[str, Any] = {}
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return super().launch(job_overrides, initial_job_idx)

    def room(self) -> int:
        return int(self.params["jobs_at_once"]) - len(self.running)

    def submit(self, sweep: Sweep, jobs: Sequence[Planned]) -> dict[str, Planned]:
        import submitit

        submitted = {}
        general = set(OmegaConf.structured(BaseQueueConf).keys())
        for planned in jobs:
            params = {key: value for key, value in resources(planned).items() if key not in _OWN}
            executor = submitit.AutoExecutor(folder=self.params["submitit_folder"], cluster="local")
            executor.update_parameters(**{k if k in general else f"local_{k}": v for k, v in params.items()})
            job = executor.submit(self, *self.arguments(planned))
            self.handed[job.job_id] = job
            planned.job.job_id = job.job_id
            sweep.note(planned.job, "running", f"runs as process {job.job_id}")
            sys.stderr.write(f"{sweep.name}: {planned.job.label} runs as process {job.job_id}\n")
            submitted[job.job_id] = planned
        return submitted

    def look(self, jobs: Sequence[str]) -> Mapping[str, Known]:
        return {job: Known(job, "RUNNING") for job in jobs if self._alive(job)}

    def _alive(self, job: str) -> bool:
        """Whether submitit's process of this number lives, and no other process has its number by now."""
        folder = str(self.params["submitit_folder"]).replace("%j", "").rstrip("/")
        try:
            with open(f"/proc/{int(job)}/cmdline", "rb") as file:
                is_ours = folder.encode() in file.read()
            with open(f"/proc/{int(job)}/stat") as file:
                return is_ours and file.read().rpartition(")")[2].split()[0] != "Z"
        except (OSError, ValueError):
            return False

    def __call__(self, *args: Any) -> None:
        """Run the job with all GPUs of this machine. submitit would hide those that it was not asked for."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus
        super().__call__(*args)

    def recall(self, job: str) -> Known | None:
        """Return the error that ended the job before its run began."""
        handed = self.handed.get(job)
        if handed is None or not handed.paths.result_pickle.exists() or (error := handed.exception()) is None:
            return None
        return Known(job, REFUSED, str(error).partition("\n-----")[2].rpartition("\n-----")[0].rpartition("Error: ")[2])

    def recover(self, planned: Planned) -> str | None:
        return planned.job.job_id  # recorded when the process starts

    def left_behind(self, jobs: Sequence[str]) -> str:
        return f"The jobs continue without this command: {' '.join(jobs)}. The same command resumes the sweep."


def register() -> None:
    """Register the launchers where Hydra looks them up by name."""
    plugins = Plugins.instance()
    for launcher in (LocalLauncher, SlurmLauncher, SlurmLocalLauncher):
        plugins.register(launcher)
        # Shim: Hydra 1.3 looks launchers up in the package hydra_plugins only. Remove it when Hydra accepts any
        # registered launcher.
        plugins.class_name_to_class[f"hydra_plugins.rlexp.{launcher.__name__}"] = launcher
