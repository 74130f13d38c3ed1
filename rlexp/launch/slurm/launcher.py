"""`hydra/launcher=slurm`: submit a sweep as arrays of Slurm jobs, one array for each set of resources."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from rlexp.base.errors import ConfigError
from rlexp.base.files import replacing
from rlexp.config import sizes
from rlexp.config.schema.launcher_keys import SlurmJobs
from rlexp.launch import run_folder
from rlexp.launch.planning import Planned, Refusal, done, refuse
from rlexp.launch.slurm import key_checks, queue
from rlexp.launch.slurm.meeting import RUN_DIR
from rlexp.launch.slurm.queue import Known, exceeded, kinds, partitions
from rlexp.launch.submitting import Submitting, resources
from rlexp.launch.sweep import Sweep


class SlurmLauncher(Submitting):
    """Launcher for a Slurm cluster. It asks `squeue` and `sinfo`; accounting is used where there is one."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with self.nothing_begun():
            key_checks.check(self.config.hydra.launcher, SlurmJobs)
            key_checks.check_folder("hydra.sweep.dir", str(self.where))
            if self.params["dry_run"]:
                return self.show(job_overrides, initial_job_idx)
            queue.needed()
            key_checks.check_container(self.params)
        return super().launch(self._on_what_is_there(job_overrides), initial_job_idx)

    def _on_what_is_there(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """Set device and ranks per node from the cluster's nodes, where the user did not set them."""
        launch, given = self.config.launch, {each.partition("=")[0] for job in job_overrides for each in job}
        device = str(getattr(launch.device, "value", launch.device))
        if "launch.device" in given or device == "cpu":
            return job_overrides
        gpus = max((each.gpus for each in kinds(partitions(), self.params.get("partition"))), default=0)
        added = [f"launch.device={'cuda' if gpus else 'cpu'}"] if device == "auto" else []
        derived = gpus and "launch.nproc" not in given and OmegaConf.is_interpolation(launch, "nproc")

        def ranks(job: Sequence[str]) -> list[str]:
            named = [each.partition("=")[2] for each in job if each.startswith("launch.ranks_per_gpu=")]
            return [f"launch.nproc={gpus * int(named[-1] if named else launch.ranks_per_gpu)}"] if derived else []

        return [[*job, *added, *ranks(job)] for job in job_overrides]

    def prepare(self, jobs: Sequence[Planned]) -> None:
        all_partitions = partitions()
        for planned in jobs:
            if planned.refusal is None and (reason := exceeded(resources(planned), all_partitions)) is not None:
                planned.refusal = Refusal("failed", reason)

    def room(self) -> int:
        return len(self.waiting)

    def submit(self, sweep: Sweep, jobs: Sequence[Planned]) -> dict[str, Planned]:
        submitted: dict[str, Planned] = {}
        for size in by_resources(jobs):
            submitted |= self._array(sweep, size)
        if submitted:
            sys.stderr.write(
                f"{sweep.name}: {len(submitted)} jobs are submitted ({', '.join(submitted)}); their folders are in "
                f"{sweep.folder}. To watch them: python -m rlexp.status {quote(str(sweep.folder))}\n"
            )
        return submitted

    def _array(self, sweep: Sweep, jobs: Sequence[Planned]) -> dict[str, Planned]:
        """Submit one array. Each job first gets a token, by which a later launcher finds it if this one dies now."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        token = f"rlexp-{uuid.uuid4().hex[:16]}"
        for place, planned in enumerate(jobs):
            planned.job.token, planned.job.job_id = f"{token}.{place}", None
        sweep.write()
        made = self._batch(sweep.folder, jobs, token)
        calls = [self.arguments(planned) for planned in jobs]
        try:
            with own_environment():
                handed = made.map_array(self, *zip(*calls, strict=True))
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            if taken := self._taken(sweep, jobs):
                return taken
            lines = [each.strip() for each in str(error).splitlines() if "sbatch: error" in each or "slurm_" in each]
            why = " ".join(lines) or queue.last_line(str(error))
            for planned in jobs:
                planned.refusal = Refusal("failed", f"Slurm did not accept it: {why}")
                refuse(sweep, planned.job, planned.refusal)
            return {}
        for planned, job in zip(jobs, handed, strict=True):
            planned.job.job_id = job.job_id
            sweep.note(planned.job, "running", f"Slurm has it, as job {job.job_id}")
        return {job.job_id: planned for planned, job in zip(jobs, handed, strict=True)}

    def _taken(self, sweep: Sweep, jobs: Sequence[Planned]) -> dict[str, Planned]:
        """Return the jobs that a slow controller has queued although sbatch reported a failure."""
        queued: dict[str, Planned] = {}
        with contextlib.suppress(queue.Silent):
            for planned in jobs:
                if (job_id := self.recover(planned)) is not None:
                    planned.job.job_id, queued[job_id] = job_id, planned
                    sweep.note(planned.job, "running", f"Slurm has it, as job {job_id}")
        return queued

    def _batch(self, where: Path, jobs: Sequence[Planned], comment: str) -> Any:
        from rlexp.launch.slurm.script import batch

        params = resources(jobs[0])
        made = batch(params, where, [planned.job.folder for planned in jobs], comment)
        made.parameters["job_name"] = f"{params['name']}-{where.name}"
        return made

    def look(self, jobs: Sequence[str]) -> Mapping[str, Known]:
        return queue.look(jobs)

    def recall(self, job: str) -> Known | None:
        return queue.recall([job]).get(job)

    def recover(self, planned: Planned) -> str | None:
        from submitit.core.utils import DelayedSubmission, JobPaths

        if planned.job.token is None:
            return None
        token, _, place = planned.job.token.partition(".")
        job = next((each for each in queue.named(token) if each.partition("_")[2] in (place, "")), None)
        if job is None:
            return None
        # Write what the job's ranks run, if the launcher died before submitit did. Ranks wait a minute for it.
        file = Path(JobPaths(self.params["submitit_folder"], job_id=job).submitted_pickle)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                DelayedSubmission(self, *self.arguments(planned)).dump(temporary)
        return job

    def withdraw(self, job: str) -> None:
        with contextlib.suppress(queue.Silent):  # the refusal is printed in any case
            queue.ask("scancel", job)

    def left_behind(self, jobs: Sequence[str]) -> str:
        return (
            f"The jobs continue without this command: {' '.join(jobs)}. The same command resumes the sweep; to end "
            f"the jobs: scancel {' '.join(jobs)}"
        )

    def show(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Print the batch scripts that would be submitted, and write nothing."""
        where = self.where
        sweep = Sweep(where, where.name, kept=False)
        jobs = self.plan(sweep, job_overrides, initial_job_idx)
        for planned in jobs:
            if planned.refusal is not None:
                refuse(sweep, planned.job, planned.refusal)
        runnable = [planned for planned in jobs if planned.refusal is None]
        if not runnable:
            raise ConfigError("hydra.launcher.dry_run=true: nothing would be submitted, since no job can be run.")
        for size in by_resources(runnable):
            names = ", ".join(planned.job.label for planned in size)
            text = self._batch(where, size, "rlexp-TOKEN").text(len(size))
            sys.stdout.write(f"# {len(size)} job{'s' * (len(size) > 1)}: {names}\n{text}\n")
        run_folder.drop_if_empty(where, "multirun.yaml")
        return [done() for _ in jobs]


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Hide the variables of a Slurm job or torchrun around this command, which sbatch would pass on to the new jobs."""
    others = (*sizes.OF_A_WORLD, RUN_DIR)
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    theirs = [name for name in os.environ if name in others or (name.startswith("SLURM_") and name not in kept)]
    taken = {name: os.environ.pop(name) for name in theirs}
    try:
        yield
    finally:
        os.environ.update(taken)


def by_resources(jobs: Sequence[Planned]) -> list[list[Planned]]:
    """Group the jobs that ask for the same resources."""
    sizes: dict[str, list[Planned]] = {}
    for planned in jobs:
        sizes.setdefault(json.dumps(resources(planned), sort_keys=True, default=str), []).append(planned)
    return list(sizes.values())
