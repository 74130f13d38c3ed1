"""Sweeps from the shell: they go on after failures, say which jobs were not run, and can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from rlexp.config.options import in_grammar
from rlexp.launch.sweep import axes_of, short
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.runs import jobs_of, ranks_of, steps_of, wait_for
from tests.helpers.slurm.watched import paced

QUICK = ("launch.device=cpu", "logger=none", "engine=torch", "checkpoint.export=false", "data.size=40",
         "data.eval_size=0", "model.layers=1", "hydra.sweep.dir=sw")  # fmt: skip


def test_a_sweep_goes_on_and_says_what_was_not_run(rlexp: Shell, tmp_path: Path) -> None:
    """One corner of the grid does not divide, one job diverges; the others are run and compared."""
    sweep = ("-m", *QUICK, "launch.nproc=2", "train.max_steps=3", "parallel=ring1,ring2", "train.batch_size=3,4",
             "train.micro_batch_size=1", "optim.lr=1e-3,1e30")  # fmt: skip
    answer = rlexp(*sweep)
    assert answer.returncode == 1
    jobs = {job["label"]: job for job in jobs_of(tmp_path / "sw")}
    assert {label: job["status"] for label, job in jobs.items()} == {
        "ring1, batch_size=3, lr=0.001": "skipped",
        "ring1, batch_size=3, lr=1e+30": "skipped",
        "ring1, batch_size=4, lr=0.001": "finished",
        "ring1, batch_size=4, lr=1e+30": "failed",
        "ring2, batch_size=3, lr=0.001": "finished",
        "ring2, batch_size=3, lr=1e+30": "failed",
        "ring2, batch_size=4, lr=0.001": "finished",
        "ring2, batch_size=4, lr=1e+30": "failed",
    }
    assert jobs["ring1, batch_size=3, lr=0.001"]["reason"].startswith("train.batch_size=3: 2 replicas × ")
    assert "is not finite" in jobs["ring2, batch_size=4, lr=1e+30"]["reason"]
    assert not (tmp_path / "sw" / "0").exists()
    assert "ring1, batch_size=3, lr=0.001 is skipped: train.batch_size=3: " in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "skipped" in answer.stdout
    assert "ring1, batch_size=4, lr=1e+30 is failed: " in answer.stdout
    assert {"report.html", "curves.png", "summary.json"} <= {path.name for path in (tmp_path / "sw").iterdir()}

    # Every job knows its sweep; jobs of one experiment share a baseline.
    config = (tmp_path / "sw" / "6" / "config.yaml").read_text(encoding="utf-8")
    assert f"baseline: {tmp_path}/sw/2" in config
    assert "group: sw" in config
    assert "run_name: sw-ring2, batch_size=4, lr=0.001" in config
    assert "  axes:\n    parallel: ring2\n    train.batch_size: '4'\n    optim.lr: '0.001'\n" in config

    # Resumed: finished jobs are not run a second time.
    before = (tmp_path / "sw" / "2" / "run.json").read_bytes()
    again = rlexp(*sweep)
    assert again.returncode == 1
    assert (tmp_path / "sw" / "2" / "run.json").read_bytes() == before
    other = rlexp(*[part.replace("train.batch_size=3,4", "train.batch_size=4,8") for part in sweep])
    assert other.returncode == 1
    assert other.stderr.startswith("rlexp: hydra.sweep.dir=")
    assert "holds another sweep" in other.stderr


@pytest.mark.slow
def test_a_killed_sweep_is_taken_up_by_the_same_command(rlexp: Shell, tmp_path: Path) -> None:
    """The launcher is killed in the second of three jobs. The first is kept, the second goes on, the third is run."""
    sweep = ("-m", *QUICK, "train.max_steps=40", "parallel=ring1,ring2,ring4", "checkpoint.save_every=4",
             "train.precision=fp64", "train.batch_size=2")  # fmt: skip
    process = warm.start("rlexp", sweep, tmp_path)
    saved = tmp_path / "sw" / "1" / "checkpoints" / "step-00000008"
    wait_for(saved.exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=240)
    assert [job["status"] for job in jobs_of(tmp_path / "sw")] == ["finished", "running", "waiting"]
    assert 8 <= len(steps_of(tmp_path / "sw" / "1")) < 40
    first = (tmp_path / "sw" / "0" / "run.json").read_bytes()

    answer = rlexp(*sweep, timeout=250)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "sw" / "0" / "run.json").read_bytes() == first
    assert "continues from" in answer.stderr
    assert all(steps_of(tmp_path / "sw" / str(job)) == list(range(1, 41)) for job in range(3))
    summary = json.loads((tmp_path / "sw" / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["status"] == "agree"
    assert max(run["worst_difference"] or 0 for run in summary["runs"]) < 1e-12
    assert "The 3 runs draw one curve" in answer.stdout


@pytest.mark.slow
def test_a_killed_job_does_not_end_the_sweep(rlexp: Shell, tmp_path: Path) -> None:
    sweep = ("-m", *QUICK, "train.max_steps=60", "train.batch_size=2", "parallel=ring2,ring1",
             "checkpoint.save_every=5")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "rlexp", *sweep], cwd=tmp_path, env=os.environ | paced(0.1, tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: len(steps_of(tmp_path / "sw" / "0")) >= 8, process)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1
    jobs = jobs_of(tmp_path / "sw")
    assert [job["status"] for job in jobs] == ["failed", "finished"]
    assert "was killed by SIGKILL" in jobs[0]["reason"]
    assert re.search(r"It was last seen (in|after) step \d", jobs[0]["reason"])
    assert f"To continue: python -m rlexp -m {QUICK[0]} " in said
    answer = rlexp(*sweep, timeout=250)
    assert answer.returncode == 0, answer.stderr
    assert [job["status"] for job in jobs_of(tmp_path / "sw")] == ["finished", "finished"]
    assert steps_of(tmp_path / "sw" / "0") == list(range(1, 61))


@pytest.mark.slow
def test_jobs_through_submitit_are_sized_one_by_one(rlexp: Shell, tmp_path: Path) -> None:
    """submitit without a cluster: worlds of 1 and 2 ranks in one sweep, and a corner that does not divide."""
    sweep = ("-m", *QUICK, "train.max_steps=2", "parallel=ring1", "launch.nproc=1,2,3", "train.micro_batch_size=1",
             "hydra/launcher=slurm_local")  # fmt: skip
    answer = rlexp(*sweep, timeout=250)
    assert answer.returncode == 0, answer.stderr
    assert [job["status"] for job in jobs_of(tmp_path / "sw")] == ["finished", "finished", "skipped"]
    sizes = [
        json.loads((tmp_path / "sw" / job / "run.json").read_text(encoding="utf-8"))["sizes"]["world_size"]
        for job in "01"
    ]
    assert sizes == [1, 2]
    assert "The 2 runs draw one curve" in answer.stdout


def test_every_job_is_told_what_is_its_own(rlexp: Shell, tmp_path: Path) -> None:
    """This holds for jobs in batches and for the user's own folders. A name that the user varies is kept, and a job
    whose folder cannot be made does not stop the others."""
    (tmp_path / "sw").mkdir()
    (tmp_path / "sw" / "parallel=ring2").write_text("a file", encoding="utf-8")
    answer = rlexp(
        "-m", *QUICK, "train.max_steps=1", "parallel=ring1,ring2,ring4", "hydra.sweeper.max_batch_size=1",
        "logger.tags=[${hydra:job.num}]", "logger.group=mine",
        "hydra.sweep.subdir=${hydra.job.override_dirname}",
        "hydra.job.config.override_dirname.exclude_keys=["
        "launch.device,logger,engine,checkpoint.export,data.size,data.eval_size,model.layers,train.max_steps,"
        "logger.tags,logger.group]",
    )  # fmt: skip
    jobs = jobs_of(tmp_path / "sw")
    assert [(job["label"], job["status"], job["baseline"]) for job in jobs] == [
        ("ring1", "finished", 0), ("ring2", "failed", 0), ("ring4", "finished", 0),
    ], answer.stderr  # fmt: skip
    assert answer.returncode == 1
    assert "cannot be made" in jobs[1]["reason"]
    config = (tmp_path / "sw" / "parallel=ring4" / "config.yaml").read_text(encoding="utf-8")
    for line in ("group: mine", "run_name: sw-ring4", f"baseline: {tmp_path}/sw/parallel=ring1", "- '2'"):
        assert line in config
    assert "parallel: ring4" in config


@pytest.mark.slow
def test_what_is_no_corner_of_a_grid_is_a_failure(rlexp: Shell, tmp_path: Path) -> None:
    """A busy folder, a missing file, and one folder for two jobs."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}: ", "chosen": "yes", "rejected": "no"}) + "\n" for n in range(8)),
        encoding="utf-8",
    )
    own = [part for part in QUICK if not part.startswith("data.")]
    (tmp_path / "sw" / "0").mkdir(parents=True)
    with (tmp_path / "sw" / "0" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = rlexp("-m", *own, "train.max_steps=1", "data=jsonl", "data.path=rows.jsonl,rowz.jsonl,./rows.jsonl")
    assert answer.returncode == 1
    jobs = jobs_of(tmp_path / "sw")
    assert [job["status"] for job in jobs] == ["failed", "failed", "finished"]
    assert "another process is training there" in jobs[0]["reason"]
    assert "no such file" in jobs[1]["reason"]
    answer = rlexp("-m", *QUICK, "parallel=ring1,ring2", "hydra.sweep.dir=other", "hydra.sweep.subdir=x")
    assert answer.returncode == 1
    assert answer.stderr.startswith("rlexp: hydra.sweep.subdir=x: is job 0's folder, and would be job 1's too.")
    odd = ("train.batch_size=3", "train.micro_batch_size=1")
    answer = rlexp("-m", *QUICK, *odd, "parallel=ring1,ring2", "launch.nproc=2,4", "hydra.sweep.dir=no")
    assert [job["status"] for job in jobs_of(tmp_path / "no")].count("skipped") == 3


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_and_says_how_to_go_on(tmp_path: Path) -> None:
    sweep = ("-m", *QUICK, "train.max_steps=100000", "parallel=ring1,ring2", "logger.progress=false")
    process = warm.start("rlexp", sweep, tmp_path)
    wait_for(lambda: len(steps_of(tmp_path / "sw" / "0")) >= 2, process)
    second = warm.run("rlexp", sweep, tmp_path, timeout=240)
    assert second.returncode == 1
    assert second.stderr.startswith("rlexp: hydra.sweep.dir=")
    assert "another process" in second.stderr
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=240)
    assert process.returncode == 130
    assert [job["status"] for job in jobs_of(tmp_path / "sw")] == ["stopped", "waiting"]
    assert " hydra.sweep.dir=" in told.partition("To continue: python -m rlexp ")[2]
    assert "stopped" in said


def test_what_varies_and_how_it_is_called() -> None:
    jobs = [["parallel=ring1", "seed=0", "+sweep=x"], ["parallel=ring2", "seed=0", "+sweep=x"]]
    assert axes_of(jobs) == ["parallel"]
    assert axes_of(jobs[:1]) == []
    assert axes_of([*jobs, ["parallel=ring2", "+sweep=x"]]) == ["parallel", "seed"]
    assert short("parallel", "ring4") == "ring4"
    assert short("data.max_length", "2048") == "max_length=2048"
    assert short("+experiment", "bug_report") == "bug_report"
    assert short("seed", "1") == "seed=1"


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_text_passes_through_hydras_grammar(text: str) -> None:
    assert OverridesParser.create().parse_override(f"key={in_grammar(text)}").value() == text
