"""Jobs that a cluster cannot run are refused at once in one message, jobs that cannot start are named, and the launcher
understands what users and administrators do to jobs and to Slurm."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.runs import run_json, steps_of
from tests.helpers.slurm.jobs import QUICK, Sweep, rank_pids, wait_for
from tests.helpers.slurm.lab import Lab

POLL = "hydra.launcher.poll_seconds=1"
RANKS = ("parallel=ring2", "launch.nproc=2", "train.max_steps=3")
# What each job asks for, and the message that refuses it.
REFUSED = {
    "partition": (("hydra.launcher.partition=nowhere",),
                  r"hydra\.launcher\.partition=nowhere: this cluster has no partition nowhere\. It has high, main\."),
    "gpus": (("launch.device=cuda", "launch.nproc=16"),
             r"launch\.nproc=16: no node of partition main has so many GPUs; the largest has 8\."),
    "nodes": (("launch.nodes=4",), r"launch\.nodes=4: partition main has 2 nodes\."),
    "processors": (("launch.rank_cpus=9",), r"launch\.rank_cpus=18: no node of partition main has so many processors; "
                   r"the largest has 16\."),
    "memory": (("launch.rank_memory_gb=9",), r"18432 MB are more than a node of partition main has \(16000 MB\)"),
    "time": (("hydra.launcher.partition=high", "launch.time_limit=2h"),
             r"launch\.time_limit: 7200 s are more than partition high allows \(3600 s\)"),
    "account": (("hydra.launcher.partition=high", "hydra.launcher.account=nobody", "launch.time_limit=30m"),
                r"would never start it: Job's account not permitted to use this partition"),
    "sbatch": (("hydra.launcher.constraint=fast",), r"Slurm did not accept it: .*Invalid feature specification"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(session_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sweep]]:
    """Start all sweeps at once, since none of them waits for anything."""
    session_lab.run("scontrol", "update", "PartitionName=high", "MaxTime=60", "AllowAccounts=physics", "AllowQos=ALL")
    started = {}
    try:
        for name, (asked, _) in REFUSED.items():
            folder = tmp_path_factory.mktemp(name)
            started[name] = Sweep(session_lab, folder, *QUICK, *RANKS, POLL, *asked)
        yield started
    finally:
        for sweep in started.values():
            sweep.kill()
        session_lab.run("scontrol", "update", "PartitionName=high", "MaxTime=UNLIMITED", "AllowAccounts=ALL")
        session_lab.cancel_all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cluster_cannot_do_is_refused(refused: dict[str, Sweep], name: str) -> None:
    sweep = refused[name]
    assert sweep.wait(120) == 1, sweep.told()
    assert re.search(REFUSED[name][1], sweep.said), sweep.told()
    assert "Traceback" not in sweep.said
    (job,) = sweep.jobs()
    assert job["status"] == "failed"
    assert job["job_id"] is None or name == "account"
    assert str(sweep.folder.parent) not in sweep.lab.run("squeue", "--noheader", "--format=%Z")


def test_no_slurm_on_the_path(lab: Lab, tmp_path: Path) -> None:
    with Sweep(lab, tmp_path, *QUICK, *RANKS, PATH=str(Path(sys.executable).parent)) as sweep:
        assert sweep.wait(120) == 1, sweep.told()
        assert "hydra/launcher=slurm: there is no sbatch on the path of this machine." in sweep.said
        assert "Traceback" not in sweep.said


@pytest.mark.timeout(600)
def test_a_cluster_without_accounting(lab_without_accounting: Lab, tmp_path: Path) -> None:
    fault = "0:rank=1,where=step2,how=kill"
    with Sweep(lab_without_accounting, tmp_path, *QUICK, *RANKS, POLL, "seed=0,1", fault=fault) as sweep:
        assert sweep.wait(400) == 1, sweep.told()
        failed, finished = sweep.jobs()
        assert (failed["status"], finished["status"]) == ("failed", "finished"), sweep.told()
        assert failed["reason"].startswith("rank 1 failed: the process was killed by SIGKILL on node bare1\nIts log: ")
        assert steps_of(sweep.run_dir(1)) == [1, 2, 3]


@pytest.mark.timeout(600)
def test_what_others_do_to_the_jobs_of_a_sweep(lab: Lab, tmp_path: Path) -> None:
    """One job trains on, one waits, one is held. The controller goes away for a while. Then the waiting and the running
    job are cancelled, and the held one is released."""
    alone = "hydra.launcher.array_parallelism=1"
    with Sweep(lab, tmp_path, *QUICK, *RANKS[:2], POLL, alone, "train.max_steps=100000,3,4") as sweep:
        wait_for(lambda: sweep.jobs() and steps_of(sweep.run_dir(0)), 200, sweep.told)
        running, waiting, held = (str(job["job_id"]) for job in sweep.jobs())
        lab.stop("slurmctld")
        wait_for(lambda: "Asking again." in sweep.said, 200, sweep.told)
        time.sleep(5)
        assert sweep.said.count("Asking again.") == 1, sweep.said
        lab.start("slurmctld")
        assert sweep.process.poll() is None, sweep.told()

        lab.run("scontrol", "hold", held)
        lab.run("scancel", waiting)
        wait_for(lambda: f"max_steps=4 waits as job {held} and cannot start: JobHeld" in sweep.said, 60, sweep.told)
        cancelled = f"max_steps=3 is stopped: job {waiting} was cancelled before it had begun"
        wait_for(lambda: cancelled in sweep.said, 60, sweep.told)

        lab.run("scancel", running)
        wait_for(lambda: f"max_steps=100000 is stopped: job {running} was cancelled" in sweep.said, 60, sweep.told)
        assert not rank_pids(running, lab)
        lab.run("scontrol", "release", held)
        assert sweep.wait(200) == 1, sweep.told()  # cancelled jobs have not finished
        assert [job["status"] for job in sweep.jobs()] == ["stopped", "stopped", "finished"], sweep.told()
        assert "Traceback" not in sweep.said
        left = run_json(sweep.run_dir(0))
        assert (left["status"], left["reason"]) == ("stopped", f"job {running} was cancelled"), left
