"""Write the batch scripts of a sweep: one array for all jobs that ask Slurm for the same resources."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from rlexp.launch.slurm import preamble
from rlexp.launch.slurm.key_checks import one_line
from rlexp.launch.slurm.meeting import INTERFACES, RUN_DIR

# Keys of the launcher's configuration that are rlexp's own, not sbatch's.
_OWN = ("_target_", "submitit_folder", "max_num_timeout", "retries", "dry_run", "poll_seconds", "modules", "container",
        "environment", "interface", "python", "setup")  # fmt: skip
SHARED = ("name", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")


class BatchScript(submitit.SlurmExecutor):
    """submitit's executor, which can also show its script, on any machine."""

    @classmethod
    def affinity(cls) -> int:
        """Say that srun is here: submitit makes no executor without it."""
        return 2

    def text(self, jobs: int) -> str:
        """Return the script of an array of `jobs` jobs, or of a single job."""
        alone = BatchScript(self.folder, python=self.python)
        alone.parameters = self.parameters | ({"map_count": jobs} if jobs > 1 else {})
        shown: str = alone._make_submission_file_text(alone._submitit_command_str, "")
        return shown


def batch(params: Mapping[str, Any], sweep: Path, folders: Sequence[str], comment: str) -> BatchScript:
    """Build the batch of the jobs in these folders of the sweep. `params` is their resolved launcher configuration."""
    # `setup` is made of such lines
    one_line("hydra.launcher", {key: value for key, value in params.items() if key != "setup"})
    folder = Path(params["submitit_folder"])
    made = BatchScript(folder, python=python_of(params))
    given = {key: value for key, value in params.items() if key not in _OWN and value is not None}
    converted = made._convert_parameters({key: given.pop(key) for key in SHARED if key in given})
    extra = {"requeue": True, **given.pop("additional_parameters", {})}
    made.update_parameters(
        **converted, **{"comment": comment} | given, additional_parameters=extra,
        setup=setup(params, sweep, folders), teardown=teardown(params, folder),
    )  # fmt: skip
    return made


def python_of(params: Mapping[str, Any]) -> str:
    """Return the shell command that starts a rank's Python, inside the container where there is one."""
    container = params["container"]
    python = params["python"] or ("python" if container else sys.executable)
    return f"{container} {shlex.quote(python)}" if container else shlex.quote(python)


def setup(params: Mapping[str, Any], sweep: Path, folders: Sequence[str]) -> list[str]:
    """Shell lines before srun: the run's folder, the preamble, and the site's own settings."""
    return [
        'echo "rlexp: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" >&2',
        f"runs=({' '.join(map(shlex.quote, folders))})",
        f'export {RUN_DIR}={shlex.quote(str(sweep))}/"${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}"',
        *preamble.LINES,
        *(f"module load {shlex.quote(module)}" for module in params["modules"]),
        *(f"export {name}={shlex.quote(params['interface'])}" for name in INTERFACES if params["interface"]),
        *(f"export {name}={shlex.quote(str(value))}" for name, value in params["environment"].items()),
        *(params["setup"] or []),
    ]


def teardown(params: Mapping[str, Any], folder: Path) -> list[str]:
    """Shell lines after srun: record how the job ended, and queue it again where it can go on."""
    log = str(folder.absolute() / "%j_%t_log.err")
    return [
        f"answer=$({python_of(params)} -m rlexp.launch.slurm.ended $? --retries={params['retries']} "
        f"--log={shlex.quote(log)})",
        'rlexp_leave $? "$answer"',
    ]
