"""rlexp's launchers for Hydra, registered under the names that `launchers/` uses."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job, setup_globals

from rlexp.launch import run_folder
from rlexp.launch.local import Interrupted
from rlexp.launch.planning import SUBDIR, Planned, SweepLauncher, done, note_own_word, refuse
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
        try:
            returned = run_job(
                hydra_context=self.hydra_context,
                task_function=self.task_function,
                config=planned.config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key=SUBDIR,
            )
        except SystemExit as left:
            note_own_word(sweep, planned.job)
            if isinstance(left.code, int) and left.code > 128:
                raise Interrupted(left.code - 128) from None
            return
        except Exception as error:  # raised by Hydra, as for a folder that cannot be made: only this job fails
            self.failed(sweep, planned.job, error)
            return
        finally:
            run_folder.leave(sweep.folder / planned.job.folder)
        self.record_end(sweep, planned.job, returned)


def register() -> None:
    """Register the launchers where Hydra looks them up by name."""
    plugins = Plugins.instance()
    for launcher in (LocalLauncher, SlurmLauncher, SlurmLocalLauncher):
        plugins.register(launcher)
        # Shim: Hydra 1.3 looks launchers up in the package hydra_plugins only. Remove it when Hydra accepts any
        # registered launcher.
        plugins.class_name_to_class[f"hydra_plugins.rlexp.{launcher.__name__}"] = launcher
