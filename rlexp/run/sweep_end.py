"""The end of a sweep: compare its runs, and return an exit code that says whether every job went well."""

from __future__ import annotations

import sys

from rlexp.launch.planning import opened
from rlexp.launch.run_folder import command_in
from rlexp.launch.sweep import Sweep


def end_sweeps(exit_code: int) -> int:
    """End each sweep that this process began. `exit_code` is what the sweep's own command returned."""
    for sweep in opened:
        if sweep.begun:
            exit_code = _end(sweep, exit_code)
    return exit_code


def _end(sweep: Sweep, exit_code: int) -> int:
    from rlexp.compare.__main__ import main as compare  # here, since a single run does not need it

    unfinished = [job for job in sweep.jobs if job.status not in ("finished", "skipped")]
    finished = [job for job in sweep.jobs if job.status == "finished"]
    compared = compare([str(sweep.folder)])
    if unfinished:
        states = ", ".join(f"{job.label} is {job.status}" for job in unfinished)
        again = command_in(sweep.folder, "hydra.sweep.dir")
        sys.stderr.write(f"rlexp: {states}. To continue: {again}\n")
    if exit_code:
        return exit_code
    asked = "train.stop_after="  # begins the reason of a job that stopped where its configuration told it to
    stopped = [job for job in sweep.jobs if job.status == "stopped" and not str(job.reason).startswith(asked)]
    failed = stopped or any(job.status == "failed" for job in sweep.jobs)
    return 1 if failed or compared or not (finished or unfinished) else 0
