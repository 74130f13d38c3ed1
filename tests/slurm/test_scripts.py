"""Slurm jobs without submitit: the two batch scripts of `launchers/`, and a plain srun. They run at the same time,
since most of the time goes into starting ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.curves import excesses
from bench.resume import curve_of
from rlexp.config.load import from_file
from tests.helpers.paths import ROOT
from tests.helpers.runs import run_json, steps_of
from tests.helpers.slurm.jobs import QUICK, planted, struck, wait_for
from tests.helpers.slurm.lab import Lab

LAUNCHERS = ROOT / "launchers"
SIZES = {"srun.sh": ("--ntasks-per-node=1",), "torchrun.sh": ()}  # on two nodes each
RING = {"srun.sh": "parallel=ring2", "torchrun.sh": "parallel=ring4"}
STEPS = 5
PATIENCE = 250.0  # seconds, for a busy machine
RUN = (*QUICK, f"train.max_steps={STEPS}", "checkpoint.save_every=null")

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def nodes_of(run_dir: Path) -> tuple[int, int]:
    """Return the nodes of a run, and the ranks on each."""
    launch = from_file(run_dir / "config.yaml").launch
    return launch.nodes, launch.nproc


class Script:
    """One of the scripts, submitted from its own folder, with a fault planted in one rank."""

    def __init__(self, lab: Lab, folder: Path, name: str, fault: str) -> None:
        self.lab, self.name, self.folder = lab, name, folder / name
        self.folder.mkdir()
        env = surroundings(lab) | planted(fault, self.folder) | {"PYTHON": sys.executable, "RANKS": "2"}
        answer = subprocess.run(
            ["sbatch", "--parsable", "--cpus-per-task=1", *SIZES[name], str(LAUNCHERS / name), RING[name], *RUN],
            cwd=self.folder, env=env, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        self.job = answer.stdout.strip()
        self.run_dir = self.folder / "runs" / f"slurm-{self.job}"

    def facts(self) -> dict[str, str]:
        """Return what the controller knows of the job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.lab.run("scontrol", "show", "job", self.job)))

    def ended(self) -> bool:
        return self.facts()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def told(self) -> str:
        """Return what is needed to find out why a test failed."""
        logs = [*self.folder.glob("slurm-*.out"), *self.run_dir.glob("logs/*")]
        texts = [f"== {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}" for log in logs]
        return "\n".join([self.name, str(self.facts()), *texts])


def surroundings(lab: Lab) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))} | lab.env()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The same run in one process and without Slurm, in the folder `alone`."""
    command = [sys.executable, "-m", "rlexp", "hydra.run.dir=alone", "parallel=ring1", *RUN]
    with (tmp_path / "alone.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def test_a_run_on_two_nodes_is_put_back_and_draws_the_curve_of_one_process(
    lab: Lab, tmp_path: Path, alone: subprocess.Popen[bytes]
) -> None:
    """The warning signal requeues the job in its third step. No step is lost, and none is computed twice."""
    scripts = [Script(lab, tmp_path, name, "rank=1,where=step3,how=stop,once") for name in SIZES]
    for script in scripts:
        (fault,) = wait_for(lambda script=script: struck(script.folder), PATIENCE, script.told)
        lab.run("scancel", "--signal=USR2", script.job)
        os.kill(fault["pid"], signal.SIGCONT)
    assert alone.wait(PATIENCE) == 0
    for script in scripts:
        wait_for(script.ended, PATIENCE, script.told)
        facts, run = script.facts(), run_json(script.run_dir)
        assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), script.told()
        assert (run["status"], run["reason"]) == ("finished", "all steps are done")
        assert [(again["why"], again["step"]) for again in run["requeues"]] == [("stop", 3)], script.told()
        assert steps_of(script.run_dir) == [*range(1, STEPS + 1)]
        assert excesses(curve_of(script.run_dir), curve_of(tmp_path / "alone")) == []
        assert nodes_of(script.run_dir) == (2, 1 if script.name == "srun.sh" else 2)


def test_a_rank_that_fails_ends_its_job_and_its_error_is_told(lab: Lab, tmp_path: Path) -> None:
    scripts = [Script(lab, tmp_path, name, f"rank={rank},where=step2,how=raise")
               for name, rank in (("srun.sh", 1), ("torchrun.sh", 3))]  # fmt: skip
    for script, rank in zip(scripts, (1, 3), strict=True):
        wait_for(script.ended, PATIENCE, script.told)
        facts, run = script.facts(), run_json(script.run_dir)
        assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "0"), script.told()
        assert run["status"] == "failed"
        assert run["reason"].startswith(f"rank {rank} failed: "), run["reason"]
        assert "ZeroDivisionError: on purpose" in run["reason"]
        (log,) = re.findall(r"^Its log: (.*)$", run["reason"], flags=re.MULTILINE)
        assert "ZeroDivisionError: on purpose" in Path(log).read_text(encoding="utf-8"), script.told()


@pytest.mark.prove
def test_a_killed_rank_of_either_script_ends_its_job(lab: Lab, tmp_path: Path) -> None:
    scripts = [Script(lab, tmp_path, name, "rank=1,where=step2,how=kill") for name in SIZES]
    for script in scripts:
        wait_for(script.ended, PATIENCE, script.told)
        facts, run = script.facts(), run_json(script.run_dir)
        assert facts["JobState"] == "FAILED", script.told()
        assert facts["ExitCode"] != "0:0"
        assert run["status"] == "failed"
        assert "SIGKILL" in run["reason"], run["reason"]
        (log,) = re.findall(r"^Its log: (.*)$", run["reason"], flags=re.MULTILINE)
        assert Path(log).exists(), run["reason"]


def test_a_plain_srun_trains_and_fails_aloud(lab: Lab, tmp_path: Path) -> None:
    """Without a batch script, RLEXP_RUN_DIR is not set."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", sys.executable, "-m", "rlexp"]

    def start(name: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, f"hydra.run.dir={name}", "parallel=ring2", *QUICK, "train.max_steps=2"], cwd=tmp_path,
            env=surroundings(lab) | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    good, bad = start("good"), start("bad", **planted("rank=1,where=step2,how=raise", tmp_path))
    said, heard = (process.communicate(timeout=PATIENCE)[0] for process in (good, bad))
    assert good.returncode == 0, said
    assert run_json(tmp_path / "good")["status"] == "finished"
    assert steps_of(tmp_path / "good") == [1, 2]
    assert nodes_of(tmp_path / "good") == (2, 1)
    assert bad.returncode not in (0, None), heard
    assert "rank 1" in heard
    assert "ZeroDivisionError: on purpose" in heard
    assert run_json(tmp_path / "bad")["status"] == "failed"
    assert not list(tmp_path.glob(".meeting-*"))
