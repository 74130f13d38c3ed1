"""The command that started a sweep is killed and given again: no job runs twice, and every job finishes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import jobs_of, run_json, steps_of
from tests.helpers.slurm.jobs import QUICK, Sweep, wait_for
from tests.helpers.slurm.lab import Lab
from tests.helpers.slurm.watched import paced, taken

JOBS = (*QUICK, "parallel=ring1", "launch.nproc=1", "launch.rank_cpus=1",
        "train.max_steps=25", "hydra.launcher.poll_seconds=1", "hydra.launcher.array_parallelism=1",
        "data.max_length=224,256,288")  # fmt: skip


def deadly_sbatch(folder: Path) -> dict[str, str]:
    """Return a PATH with an sbatch that kills its caller after Slurm has the jobs, and before the caller knows it."""
    script = folder / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" > {folder}/sbatch.out\nkill -9 $PPID\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.timeout(900)
def test_a_launcher_that_is_killed_twice_starts_nothing_twice(lab: Lab, tmp_path: Path) -> None:
    """First between submitting and writing the ledger, then while one job runs and the others wait."""
    own = paced(0.2, tmp_path)
    with Sweep(lab, tmp_path, *JOBS, **own, **deadly_sbatch(tmp_path)) as sweep:
        assert sweep.wait(120) == -9, sweep.told()
        assert "Submitted batch job" in (tmp_path / "sbatch.out").read_text()
        assert [(job["job_id"], bool(job["token"])) for job in sweep.jobs()] == [(None, True)] * 3
    with Sweep(lab, tmp_path, *JOBS, **own) as sweep:
        wait_for(lambda: len(taken(tmp_path)) >= 3, 300, sweep.told)
        ids = [job["job_id"] for job in sweep.jobs()]
        sweep.kill()
        assert sweep.said.count("is running already, as job") == 3
    with Sweep(lab, tmp_path, *JOBS, **own) as sweep:
        assert sweep.wait(400) == 0, sweep.told()
        assert [job["job_id"] for job in sweep.jobs()] == ids
        assert [job["status"] for job in sweep.jobs()] == ["finished"] * 3, sweep.told()
    assert {(each.job, each.start) for each in taken(tmp_path)} == {(job, 0) for job in ids}
    assert len({each.pid for each in taken(tmp_path)}) == 3
    assert sorted(each.step for each in taken(tmp_path)) == sorted([*range(1, 26)] * 3)
    # All jobs ever submitted from this folder; sweeps of other tests have the same name.
    everything = lab.run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%Z").splitlines()
    assert sorted(line for line in everything if line.endswith(f"|{tmp_path}")) == sorted(
        f"{job}|COMPLETED|{tmp_path}" for job in ids
    )
    assert (sweep.folder / "summary.json").exists()
    with Sweep(lab, tmp_path, *JOBS, **own) as sweep:
        assert sweep.wait(120) == 0, sweep.told()
    assert len(taken(tmp_path)) == 75


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_jobs_that_ended_while_nobody_looked(lab: Lab, tmp_path: Path) -> None:
    """One job has finished, the other was cancelled by hand: the first is kept, the other submitted again."""
    jobs = (*JOBS[:-2], "data.max_length=224,256")
    own = paced(0.2, tmp_path)
    with Sweep(lab, tmp_path, *jobs, **own) as sweep:
        first, second = wait_for(lambda: [job["job_id"] for job in sweep.jobs() if job["job_id"]], 60, sweep.told)
        sweep.kill()
    wait_for(lambda: len(taken(tmp_path, second)) >= 5, 300, sweep.told)
    lab.run("scancel", second)
    wait_for(lambda: run_json(sweep.run_dir(0))["status"] == "finished", 300, sweep.told)
    done = len(taken(tmp_path, first))
    with Sweep(lab, tmp_path, *jobs, **own) as sweep:
        assert sweep.wait(400) == 0, sweep.told()
        assert [job["status"] for job in sweep.jobs()] == ["finished"] * 2, sweep.told()
        assert sweep.jobs()[1]["job_id"] not in (None, first, second)
    assert len(taken(tmp_path, first)) == done == 25
    assert [steps_of(sweep.run_dir(number)) for number in (0, 1)] == [[*range(1, 26)]] * 2
    assert len(json.loads((sweep.folder / "sweep.json").read_text())["jobs"]) == len(jobs_of(sweep.folder)) == 2
