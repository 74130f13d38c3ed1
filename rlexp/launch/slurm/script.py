"""What the jobs of a sweep are sent to Slurm as: one batch script for all that ask for the same."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from rlexp.launch.slurm.meeting import INTERFACES, RUN_DIR
from rlexp.launch.stops import END_TIME

# Ours, and not sbatch's.
_OWN = ("_target_", "submitit_folder", "max_num_timeout", "retries", "dry_run", "poll_seconds", "modules", "container",
        "environment", "interface", "python", "setup")  # fmt: skip
SHARED = ("name", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")


class Batch(submitit.SlurmExecutor):
    """submitit's, which can show its script too, on any machine."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def text(self, jobs: int) -> str:
        """The script of an array of so many jobs, or of one job."""
        alone = Batch(self.folder, python=self.python)
        alone.parameters = self.parameters | ({"map_count": jobs} if jobs > 1 else {})
        shown: str = alone._make_submission_file_text(alone._submitit_command_str, "")
        return shown


def batch(params: Mapping[str, Any], sweep: Path, folders: Sequence[str], comment: str) -> Batch:
    """Sized by `params`, a job's resolved launcher configuration, for jobs in these folders of the sweep."""
    folder = Path(params["submitit_folder"])
    made = Batch(folder, python=python_of(params))
    given = {key: value for key, value in params.items() if key not in _OWN and value is not None}
    converted = made._convert_parameters({key: given.pop(key) for key in SHARED if key in given})
    extra = {"requeue": True, **given.pop("additional_parameters", {})}
    made.update_parameters(
        **converted, **{"comment": comment} | given, additional_parameters=extra,
        setup=setup(params, sweep, folders), teardown=teardown(params, folder),
    )  # fmt: skip
    return made


def python_of(params: Mapping[str, Any]) -> str:
    """A rank's, as the shell takes it. A container has its own."""
    container = params["container"]
    python = params["python"] or ("python" if container else sys.executable)
    return f"{container} {shlex.quote(python)}" if container else shlex.quote(python)


def setup(params: Mapping[str, Any], sweep: Path, folders: Sequence[str]) -> list[str]:
    """What stands before srun: the run's folder, how its ranks end together, when its time is up, and the site's."""
    return [
        'echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" >&2',
        f"runs=({' '.join(map(shlex.quote, folders))})",
        JOB,
        f'export {RUN_DIR}={shlex.quote(str(sweep))}/"${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}"',
        *COMMON,
        *(f"module load {shlex.quote(module)}" for module in params["modules"]),
        *(f"export {name}={shlex.quote(params['interface'])}" for name in INTERFACES if params["interface"]),
        *(f"export {name}={shlex.quote(str(value))}" for name, value in params["environment"].items()),
        *(params["setup"] or []),
    ]


# Slurm takes the bare number of an array's last task, which is the array's, for all of its tasks.
JOB = "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}"
# A rank that fails takes the others along, and so does one that leaves 15 s before them. srun forgets the processors
# of a task since Slurm 22.05. Not every Slurm says when a job's time is up.
COMMON = (
    "export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=15 SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}",
    f': "${{{END_TIME}:=$(date -d "$(squeue -h -j "$job" -o %e)" +%s 2>/dev/null)}}"',
    f"export {END_TIME}",
)


def teardown(params: Mapping[str, Any], folder: Path) -> list[str]:
    """What stands behind srun: how it ended is written down, and what is to go on is queued again."""
    log = str(folder.absolute() / "%j_%t_log.err")
    return [
        f"answer=$({python_of(params)} -m rlexp.launch.slurm.ended $? --retries={params['retries']} "
        f"--log={shlex.quote(log)})",
        "code=$?",
        'if [ "$answer" = requeue ]; then',
        '    until scontrol requeue "$job" || [ $((tries += 1)) -ge 10 ]; do sleep 15; done',
        "fi",
        "exit $code",
    ]
