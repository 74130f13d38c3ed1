"""rlexp's launchers for Hydra, registered under the names that `launchers/` uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals

from rlexp.launch import run_folder
from rlexp.launch.local import Interrupted
from rlexp.launch.planning import SUBDIR, Planned, Refusal, SweepLauncher, done, refusal, refuse
from rlexp.launch.slurm.launcher import SlurmLauncher
from rlexp.launch.slurm.local_launcher import SlurmLocalLauncher
from rlexp.launch.sweep import Sweep


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


def register() -> None:
    """Register the launchers where Hydra looks them up by name."""
    plugins = Plugins.instance()
    for launcher in (LocalLauncher, SlurmLauncher, SlurmLocalLauncher):
        plugins.register(launcher)
        # Shim: Hydra 1.3 looks launchers up in the package hydra_plugins only. Remove it when Hydra accepts any
        # registered launcher.
        plugins.class_name_to_class[f"hydra_plugins.rlexp.{launcher.__name__}"] = launcher
