"""The verdict on a Slurm job whose ranks are gone, from what they and srun reported."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from rlexp.base.errors import UserError
from rlexp.launch import rank_reports, run_folder
from rlexp.launch.local import report_here
from rlexp.launch.rank_reports import RankReport
from rlexp.launch.slurm import ended, traces
from rlexp.launch.slurm.ended import main
from rlexp.launch.slurm.launcher import SlurmLauncher
from rlexp.launch.slurm.meeting import start_of_job
from rlexp.launch.slurm.traces import Gone, gone, numbers
from rlexp.launch.slurm.verdict import AGAIN, IN_VAIN, Facts, Verdict, ambiguous, judge
from rlexp.launch.sweep import Job

RESET = "Traceback\nRuntimeError: [gloo/pair.cc:537] Read error [10.0.0.1]:2: Connection reset by peer"
LATE = "Traceback\nRuntimeError: [gloo/buf.cc:73] Timed out waiting 5000ms for recv operation to complete"
BROKE = "Traceback\nZeroDivisionError: division by zero"


def lost(*ranks: int, text: str = RESET) -> list[RankReport]:
    return [RankReport(rank, 10.0 + rank, text) for rank in ranks]


def requeued(*steps: int, why: str = "stop") -> list[dict]:
    return [{"job": "7", "why": why, "step": step} for step in steps]


RUNNING = Facts(1, "running", None, world_size=4, log="/logs/7_%t.err")


@pytest.mark.parametrize(
    ("facts", "status", "requeue", "said"),
    [
        (replace(RUNNING, code=0, status="finished", reason="all steps done"), "finished", "", "all steps done"),
        (replace(RUNNING, code=0, status="stopped", reason="train.stop_after=5"), "stopped", "", "train.stop_after=5"),
        # The first rank with an error of its own decides, and the job is not started again.
        (replace(RUNNING, reports=[*lost(0, 1), RankReport(2, 20.0, BROKE)], retries=5), "failed", "", "rank 2 failed"),
        (replace(RUNNING, reports=[RankReport(1, 9.0, "no", UserError("no"))], retries=5), "failed", "", "no"),
        (replace(RUNNING, code=0, status="finished", reports=[RankReport(3, 1, BROKE)]), "failed", "", "rank 3 failed"),
        (replace(RUNNING, status="failed", reason="the disk is full"), "failed", "", "the disk is full"),
        # Killed from outside: started again as often as `retries` allows.
        (replace(RUNNING, code=137, gone=[Gone(3, "n2", "Killed"), Gone(0, "n1", "Terminated")], reports=lost(0)),
         "failed", "", "rank 3 failed: the process was killed by SIGKILL on node n2\nIts log: /logs/7_3.err"),
        (replace(RUNNING, gone=[Gone(3, "n2", "Killed")], retries=1), "stopped", "retry", "was killed by SIGKILL"),
        (replace(RUNNING, gone=[Gone(3, "n2", "Killed")], retries=1, requeues=requeued(4, why="retry")),
         "failed", "", "(1 retries are used up)"),
        (replace(RUNNING, gone=[Gone(3, "n2", "Out Of Memory")], out_of_memory=True), "failed", "", "no memory left"),
        (replace(RUNNING, gone=[Gone(0, "n1", "Killed"), Gone(3, "n2", "Killed")], over_limit=[3]),
         "failed", "", "rank 3 failed: the process was killed by SIGKILL on node n2, since the job took more memory"),
        (replace(RUNNING, gone=[Gone(2, "n1", "Exited with exit code 3")]), "failed", "", "exited with exit code 3"),
        (replace(RUNNING, code=137, gone=[Gone(1, "", "exited", early=True)]), "failed", "", "with code 0 before the"),
        (replace(RUNNING, code=0), "failed", "", "srun ended with code 0, and no rank said why"),
        # Asked to stop.
        (replace(RUNNING, code=140, status="stopped", reason="stopped by SIGUSR2"), "stopped", "stop", "SIGUSR2"),
        (replace(RUNNING, code=143, status="stopped", reason="stopped by SIGTERM"), "stopped", "stop", "SIGTERM"),
        (replace(RUNNING, code=152, status="stopped", reason="stopped as its time was nearly up"),
         "stopped", "stop", "nearly up"),
        (replace(RUNNING, code=130, status="stopped", reason="stopped by SIGINT"), "stopped", "", "stopped by SIGINT"),
        (replace(RUNNING, code=140, status=None, gone=[Gone(0, "n1", "User defined signal 2")]),
         "stopped", "stop", "stopped by SIGUSR2"),
        (replace(RUNNING, code=140, status="stopped", reason="stopped by SIGUSR2", gone=[Gone(0, "n1", "Killed")]),
         "failed", "", "SIGKILL"),
        # A lost node reports nothing, and the ranks that waited for it report that they lost it.
        (replace(RUNNING, nodes_answer=False, reports=lost(0, 1), gone=[Gone(0, "n1", "Exited with exit code 1")]),
         "stopped", "lost", "a node or its network was lost"),
        (replace(RUNNING, nodes_answer=False, reports=lost(0, 1, text=LATE)), "stopped", "lost", "Timed out waiting"),
        (replace(RUNNING, nodes_answer=False, gone=[Gone(0, "n1", "Aborted")]), "stopped", "lost", "node"),
        (replace(RUNNING, node_failed=True), "stopped", "lost", "a node or its network was lost. See /logs/7_0.err"),
        # If all nodes answer, the silent rank exited with 0, which srun does not report.
        (replace(RUNNING, nodes_answer=True, reports=lost(0, 1, 3), gone=[Gone(3, "n2", "Exited with exit code 1")]),
         "failed", "", "rank 2 failed: the process exited with code 0 before the others had ended\nIts log: /logs/7_2"),
        # If every rank could report losing another, no node is lost: a wrong interface looks the same.
        (replace(RUNNING, reports=lost(0, 1, 2, 3)), "failed", "", "rank 0 failed: Traceback"),
        (replace(RUNNING, reports=lost(0, 1, 2, 3), retries=1), "stopped", "retry", "Connection reset by peer"),
        # A rank that a launcher on its own machine started.
        (replace(RUNNING, reports=[RankReport(0, 1.0, "rank 0 failed: killed", killed=True)], retries=1),
         "stopped", "retry", "rank 0 failed: killed"),
        (replace(RUNNING, reports=[RankReport(0, 1.0, "rank 0 failed: killed", killed=True)]), "failed", "", "killed"),
        # Starts without progress, and with progress.
        (replace(RUNNING, code=140, status="stopped", reason="stopped by SIGUSR2", step=8,
                 requeues=requeued(*[8] * 10)), "failed", "", "was started 10 times since step 8 was saved"),
        (replace(RUNNING, code=140, status="stopped", reason="stopped by SIGUSR2", step=8,
                 requeues=requeued(*[8] * 5, 7, *[8] * 9)), "stopped", "stop", ""),
    ],
)  # fmt: skip
def test_the_verdict(facts: Facts, status: str, requeue: str, said: str) -> None:
    verdict = judge(facts)
    assert (verdict.status, verdict.requeue) == (status, requeue)
    assert said in verdict.reason
    assert (verdict.code == 0) == (status in ("finished", "stopped") and not requeue and facts.code == 0)
    assert "%t" not in verdict.reason
    assert verdict.reason.endswith(AGAIN) == bool(requeue)
    assert IN_VAIN == 10


def test_who_is_slow_to_leave_a_finished_run_does_not_fail_it() -> None:
    done = replace(
        RUNNING, code=137, status="finished", reason="all steps are done", gone=[Gone(1, "", "exited", early=True)]
    )
    assert judge(done) == Verdict("finished", "all steps are done", 0)
    assert judge(replace(done, reports=[RankReport(0, 1.0, BROKE)])).status == "failed"


def test_what_ends_a_process_before_it_is_a_rank_is_reported_as_rank_0_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLEXP_RUN_DIR", str(tmp_path))
    report_here(UserError("no"))
    (report,) = rank_reports.read(tmp_path, start_of_job())
    assert (report.rank, report.text, str(report.mistake)) == (0, "no", "no")


def test_whether_a_node_was_lost_is_asked_where_it_may_have_been() -> None:
    aborted = [Gone(rank, "n1", "Aborted (core dumped)") for rank in (0, 1)]
    assert ambiguous(replace(RUNNING, reports=lost(0, 1)))
    assert ambiguous(replace(RUNNING, gone=aborted))
    assert not ambiguous(replace(RUNNING, gone=[*aborted, Gone(2, "n2", "Killed")]))
    assert not ambiguous(replace(RUNNING, reports=lost(0, 1, 2, 3)))
    assert not ambiguous(RUNNING)
    killed = replace(RUNNING, gone=[Gone(0, "n1", "Killed")])
    assert not ambiguous(killed)
    assert ambiguous(replace(killed, node_silent=True))
    said = "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1\n"
    assert traces.shows(said, traces.NODE_SILENT)
    assert not traces.shows(said, traces.NODE_FAILED)
    assert not traces.shows(f"{said}rlexp: start 1 of job 7 on n[1-2]\n", traces.NODE_SILENT)


def at(clock: str) -> str:
    return f"2026-11-22T{clock}"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs of Slurm's commands; srun starts whatever it is asked to. They answer for the job's own number, since an
    array's last task has the array's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    values = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "0",
              "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "PATH": str(folder)}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    say(folder / "srun", "exit 0")
    return folder


def up_since(commands: Path, began: str, *started: str) -> None:
    """Set when the job and its nodes' slurmds started."""
    utc = 'if [ "$TZ $SLURM_TIME_FORMAT" = "UTC standard" ]; then'
    say(commands / "squeue", f'[ "$*" = "--noheader --jobs=7_1 --format=%S" ] || exit 1; {utc} echo {began}; fi')
    shown = "; ".join(
        f"echo NodeName=n BootTime=2026-11-23T00:00:00 SlurmdStartTime={each} Weight=1" for each in started
    )
    say(commands / "scontrol", f'[ "$*" = "--oneliner show node n[1-2]" ] || exit 1; {shown}')


@pytest.mark.parametrize(
    ("began", "started", "seen", "came_back"),
    [
        (at("05:23:02"), at("05:24:11"), at("05:24:08"), True),
        (at("05:23:02"), at("05:24:11"), at("05:24:14"), True),  # clocks differ
        (at("05:23:02"), at("05:24:11"), at("05:59:00"), False),  # only slurmd was restarted, and the ranks went on
        (at("05:23:02"), at("05:24:11"), None, True),  # none had begun
        (at("05:23:02"), at("05:23:02"), None, False),
        ("N/A", at("05:24:11"), None, False),
        (at("05:23:02"), "Unknown", None, False),
    ],
)
def test_a_node_that_is_back_was_lost_all_the_same(
    commands: Path, tmp_path: Path, began: str, started: str, seen: str | None, came_back: bool
) -> None:
    """The rank that was lost with the node counts as lost, not as having exited."""
    up_since(commands, began, at("01:02:03"), started)
    where = tmp_path / "run"
    where.mkdir()
    if seen is not None:
        line = {"rank": 1, "at": datetime.fromisoformat(f"{seen}+00:00").timestamp(), "step": 3, "phase": "forward",
                "peaks": {}}  # fmt: skip
        (where / "memory.jsonl").write_text(f"{'':511}\n{json.dumps(line):511}\n", encoding="utf-8")
    rank_reports.write(where, "8.0", RankReport(0, 5.0, RESET))
    (where / "run.json").write_text(json.dumps({"status": "running", "start": "8.0", "job_id": "7_1"}))
    verdict = ended.judge_and_record(ended.gather(1, where, 0, ""), where)
    assert verdict.requeue == ("lost" if came_back else "")
    expected = "a node or its network was lost" if came_back else "rank 1 failed: the process exited with code 0"
    assert verdict.reason.startswith(expected)
    assert json.loads((where / "run.json").read_text())["reason"] == verdict.reason


def test_nobody_can_say_whether_a_node_is_back(commands: Path) -> None:
    assert not ended.a_node_came_back(0.0)
    up_since(commands, at("05:23:02"), at("05:24:11"))
    assert ended.a_node_came_back(0.0)
    (commands / "scontrol").unlink()
    assert not ended.a_node_came_back(0.0)


def say(command: Path, script: str) -> None:
    command.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    command.chmod(0o755)


def test_what_srun_says_of_a_node() -> None:
    for line in (
        "Node failure on n2",
        "Task launch for StepId=7.0 failed on node n2: Communication connection failure",
        "Aborting, io error and missing step on node 1",  # slurmstepd is gone: the node was lost, and may be back
        "Aborting, step missing and io error on node 1",
        "Aborting, can not test connection to node 1.",
        "Cannot communicate with node 1.  Aborting job.",
    ):
        text = f"rlexp: start 0 of job 7 on n[1-2]\nsrun: error: {line}\nsrun: error: n1: task 0: Killed\n"
        assert traces.shows(text, traces.NODE_FAILED), line
        assert not traces.shows(f"{text}rlexp: start 1 of job 7 on n[1-2]\n", traces.NODE_FAILED), line


def test_a_finished_run_that_is_started_again_stays_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job does not enter its folder, so run.json is an earlier start's. Another job's run is left alone too."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    finished = {"status": "finished", "reason": "all steps are done", "start": "12.0", "job_id": "12"}
    (tmp_path / "run.json").write_text(json.dumps(finished))
    assert main(["0", f"--run-dir={tmp_path}"]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    rank_reports.write(
        tmp_path, "12.1", RankReport(0, 5.0, "RuntimeError: the network is down")
    )  # before Slurm noticed
    assert main(["1", f"--run-dir={tmp_path}"]) == 1
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    assert "the network is down" in rank_reports.read_verdict(tmp_path, "12")["reason"]

    monkeypatch.setenv("SLURM_JOB_ID", "13")
    rank_reports.write(tmp_path, "13.1", RankReport(0, 5.0, "optim.lr: is not what it was", UserError("")))
    assert main(["1", f"--run-dir={tmp_path}"]) == 1
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    assert rank_reports.read_verdict(tmp_path, "13")["reason"].startswith("optim.lr: is not what it was")


def test_the_run_of_a_process_that_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "14")
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "start": "0.0", "job_id": None}))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["1", f"--run-dir={tmp_path}"]) == 1
        assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    assert main(["1", f"--run-dir={tmp_path}"]) == 1
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


def test_a_rank_that_never_came_is_named(tmp_path: Path) -> None:
    """The time-outs of the other ranks tell where they waited, and for which rank."""
    lines = [{"rank": rank, "step": 5, "phase": "forward", "peaks": {}} for rank in range(4)]
    (tmp_path / "memory.jsonl").write_text("".join(json.dumps(each).ljust(511) + "\n" for each in lines))
    verdict = judge(replace(RUNNING, reports=lost(0, 1, 3, text=LATE), run_dir=tmp_path))
    assert verdict.status == "failed"
    assert verdict.reason.startswith("rank 2 did not come to a collective that the others had begun")
    assert "Rank 2 was last seen in step 5, in its forward phase." in verdict.reason
    assert "Timed out waiting 5000ms" in verdict.reason
    assert verdict.reason.endswith("Its log: /logs/7_2.err")
    # A stopped rank goes on when the others are gone, and reports that; it is still the rank that did not come.
    woken = RankReport(2, 10.0 + rank_reports.PATIENCE + 0.5, RESET)
    late = judge(replace(RUNNING, reports=[*lost(0, 1, 3, text=LATE), woken], run_dir=tmp_path))
    assert (late.status, late.reason) == ("failed", verdict.reason)


def test_a_rank_that_could_not_report_is_quoted(tmp_path: Path) -> None:
    """It ended before it was a rank. Its last line counts; the lines that Slurm wrote after it do not."""
    facts = replace(RUNNING, gone=[Gone(2, "n1", "Exited with exit code 1")], log=str(tmp_path / "%t.err"))
    log = tmp_path / "2.err"
    log.write_text("Traceback\nImportError: libcudnn.so\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED ***\n\n")
    said = judge(facts).reason
    assert (
        said
        == f"rank 2 failed: the process exited with exit code 1 on node n1: ImportError: libcudnn.so\nIts log: {log}"
    )
    log.write_text("ImportError: of a module that it can do without\nand it went on\n")
    assert "ImportError" not in judge(facts).reason


def test_what_srun_says_of_tasks() -> None:
    text = (
        "rlexp: start 0 of job 7 on n[1-2]\nsrun: error: n9: task 0: Killed\n"
        "rlexp: start 1 of job 7 on n[1-2]\nstep 1\nsrun: error: n2: tasks 2-3,5: Exited with exit code 140\n"
        "srun: First task exited 20s ago\nsrun: StepId=20.0 tasks 0,2-3: running\nsrun: StepId=20.0 task 1: exited\n"
    )
    assert gone(text) == [
        *(Gone(rank, "n2", "Exited with exit code 140") for rank in (2, 3, 5)), Gone(1, "", "exited", early=True),
    ]  # fmt: skip
    assert all(task.by_stop for task in gone(text)[:3])
    assert not gone(text)[3].by_stop
    assert numbers("0-2,5") == [0, 1, 2, 5]


def test_it_writes_down_what_became_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From files and the environment, as in a batch script. A report of an earlier start does not count."""
    values = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1",
              "SLURM_RESTART_COUNT": "1", "SLURM_NTASKS": "2", "RLEXP_RUN_DIR": str(tmp_path)}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.json").write_text(
        json.dumps({"status": "stopped", "reason": "stopped by SIGUSR2", "start": "8.1", "wandb_id": "w",
                    "requeues": [{"job": "6", "why": "retry", "step": 0}]}))  # fmt: skip
    rank_reports.write(tmp_path, "8.0", RankReport(1, 5.0, BROKE))
    log = tmp_path / "7_1_0.err"
    log.write_text("rlexp: start 1 of job 8 on n1\nsrun: error: n1: tasks 0-1: Exited with exit code 140\n")
    assert main(["140", f"--log={tmp_path}/%j_%t.err"]) == 140
    assert capsys.readouterr().out == "requeue\n"
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["reason"], run["wandb_id"]) == ("stopped", f"stopped by SIGUSR2{AGAIN}", "w")
    assert [(each["job"], each["why"]) for each in run["requeues"]] == [("6", "retry"), ("8", "stop")]

    rank_reports.write(tmp_path, "8.1", RankReport(0, 5.0, "optim.lr=x: is no number", UserError("")))
    assert main(["1", f"--log={tmp_path}/%j_%t.err"]) == 1
    assert capsys.readouterr().out == ""
    said = json.loads((tmp_path / "run.json").read_text())["reason"]
    assert said == f"optim.lr=x: is no number\nIts log: {tmp_path}/7_1_0.err"


def test_a_run_that_never_began_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert main(["127", f"--run-dir={tmp_path / 'run'}"]) == 127
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["reason"][:22]) == ("failed", "srun ended with code 1")
    monkeypatch.delenv("RLEXP_RUN_DIR", raising=False)
    with pytest.raises(SystemExit):
        main(["1"])


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", locked)
    run_folder.claim(tmp_path)
    run_folder.leave(tmp_path)
    run_folder.hold(tmp_path)
    assert not run_folder.in_use(tmp_path)


def test_what_fails_of_being_stopped_is_no_error_of_the_users(tmp_path: Path) -> None:
    """A rank is stopped while it composes its configuration, and a `finally` of OmegaConf fails because of that. The
    rank exits as it was asked to, and reports nothing."""
    code = """
import os, signal, sys, time
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from rlexp.launch.slurm.launcher import SlurmLauncher
from rlexp.launch.slurm.meeting import start_of_job

def composes(*_):
    try:
        if len(sys.argv) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    finally:
        raise AttributeError("of a finally")

BaseSubmititLauncher.__call__ = composes
SlurmLauncher.__new__(SlurmLauncher)()
"""
    env = os.environ | {"RLEXP_RUN_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-c", code]
    stopped = subprocess.run([*command, "stop"], env=env, capture_output=True, timeout=60, check=False)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert rank_reports.read(tmp_path, "7.0") == []
    assert subprocess.run(command, env=env, capture_output=True, timeout=60, check=False).returncode == 1
    assert "AttributeError: of a finally" in rank_reports.read(tmp_path, "7.0")[0].text


TORCHRUN = """rlexp: start {start} of job 7
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
rlexp FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_18:19:5{late}
  host      : localhost
  rank      : {first} (local_rank: 1)
  exitcode  : {code} (pid: 1398)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_18:19:54
  host      : localhost
  rank      : {second} (local_rank: 0)
  exitcode  : 1 (pid: 1396)
  error_file: <N/A>
============================================================
"""


def test_of_torchruns_the_ranks_that_they_tell_of_are_judged() -> None:
    """In the order in which they ended, and only those of this start."""
    old = TORCHRUN.format(start=0, late=1, first=3, code=-9, second=2)
    logs = [TORCHRUN.format(start=1, late=5, first=1, code=-15, second=0),
            old + TORCHRUN.format(start=1, late=3, first=2, code=-9, second=3)]  # fmt: skip
    told = traces.gone_under_torchrun(logs, "")
    assert told[0] == Gone(2, "", "Killed", task=1)
    assert told[-1] == Gone(1, "", "Terminated", task=0)
    assert {task.rank: task.how for task in told[1:-1]} == dict.fromkeys((0, 3), "Exited with exit code 1")
    verdict = judge(replace(RUNNING, gone=told, reports=lost(0, 3)))
    assert verdict.reason == "rank 2 failed: the process was killed by SIGKILL\nIts log: /logs/7_1.err"


def test_of_a_torchrun_that_says_nothing_srun_does() -> None:
    old = TORCHRUN.format(start=0, late=1, first=3, code=-9, second=2)
    srun = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
    told = traces.gone_under_torchrun([old + "rlexp: start 1 of job 7\n", ""], srun)
    verdict = judge(replace(RUNNING, gone=told, reports=lost(0, 1)))
    assert verdict.reason == "torchrun was killed by SIGKILL on node n2\nIts log: /logs/7_1.err"


def test_torchruns_that_were_asked_to_stop_are_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun sees each torchrun exit with 1, as it does after anything."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    told = TORCHRUN.format(start=0, late=5, first=1, code=140, second=0).replace(": 1 (pid", ": 140 (pid")
    (tmp_path / "run.json").write_text(
        json.dumps({"start": "7.0", "status": "stopped", "reason": "stopped by SIGUSR2"}), encoding="utf-8"
    )
    (tmp_path / "srun.log").write_text("srun: error: n1: tasks 0-1: Exited with exit code 1\n", encoding="utf-8")
    for text in (told, "no table, since Slurm ended the torchrun first\n"):
        (tmp_path / "node0.log").write_text(text, encoding="utf-8")
        verdict = judge(
            ended.gather(1, tmp_path, 0, str(tmp_path / "node%t.log"), str(tmp_path / "srun.log"), torchrun=True)
        )
        assert (verdict.status, verdict.requeue, verdict.reason) == ("stopped", "stop", "stopped by SIGUSR2" + AGAIN)


def test_a_task_that_slurm_forgot_was_cancelled_if_it_had_not_begun(tmp_path: Path) -> None:
    """Slurm's queue keeps no record of a task that is cancelled while its array waits; accounting may keep none."""
    launcher = SlurmLauncher.__new__(SlurmLauncher)
    launcher.params = {"submitit_folder": str(tmp_path / "%j")}
    job = Job(1, "1", [], job_id="8_1")
    status, reason = launcher._without_a_word(job, None, begun=False)
    assert (status, reason) == ("stopped", "job 8_1 was cancelled before it had begun: there is no record of it")
    log = Path(launcher.log_of(job))
    log.parent.mkdir()
    log.touch()  # its batch script has begun
    status, reason = launcher._without_a_word(job, None, begun=False)
    assert (status, reason) == (
        "failed", f"job 8_1 ended, and its run recorded no reason: there is no record of it\nIts log: {log}"
    )  # fmt: skip
