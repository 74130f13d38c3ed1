"""Shell lines that every batch script runs before srun. The scripts of `launchers/` evaluate what
`python -m rlexp.launch.slurm.preamble` prints; scripts that rlexp writes contain those of `LINES`."""

from __future__ import annotations

import os
import shlex
import sys

from rlexp.base.command import exit_code
from rlexp.config.options import quoted
from rlexp.launch.slurm.key_checks import check_folder
from rlexp.launch.stops import END_TIME

LINES = (
    # The number of an array's last task names the whole array too, so the job is named by array and task.
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}",
    # When a rank fails, srun ends the others; when one leaves, srun gives the others 15 s. Since Slurm 22.05, srun does
    # not take over --cpus-per-task by itself.
    "export SLURM_KILL_BAD_EXIT=1 SLURM_WAIT=15 SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}",
    # Not every Slurm tells a job when its time is up.
    f': "${{{END_TIME}:=$(date -d "$(squeue -h -j "$job" -o %e)" +%s 2>/dev/null)}}"',
    f"export {END_TIME}",
    # rlexp_leave CODE ANSWER: exit with the code, and first queue the job again where the answer is `requeue`.
    "rlexp_leave() {",
    '    if [ "$2" = requeue ]; then',
    '        until scontrol requeue "$job" || [ $((tries += 1)) -ge 10 ]; do sleep 15; done',
    "    fi",
    '    exit "$1"',
    "}",
)


def run_dir(folder: str) -> str:
    """Return the line that makes an override of the run's folder, whatever characters its name has."""
    check_folder("RLEXP_RUN_DIR", folder)
    return f"rlexp_run_dir={shlex.quote(f'hydra.run.dir={quoted(folder)}')}"


def main() -> int:
    folder = os.environ.get("RLEXP_RUN_DIR")
    lines = [*LINES, *([run_dir(folder)] if folder else [])]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
