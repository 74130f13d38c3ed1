"""The faults that the Slurm tests plant happen where they should; tested without Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.programs import python
from tests.helpers.runs import descendants, gone, run_json, steps_of
from tests.helpers.slurm.jobs import planted, struck, wait_for
from tests.helpers.slurm.machine import wait_until

RUN = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "engine=torch", "checkpoint.export=false",
       "model.layers=1", "data.size=40", "data.eval_size=0", "parallel=ring2", "train.max_steps=4",
       "train.batch_size=2", "checkpoint.save_every=2")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how", "step", "said"),
    [
        ("meet", "raise", None, "ZeroDivisionError: on purpose"),
        ("step3", "kill", 3, "the process was killed by SIGKILL"),
        ("step2", "quit3", 2, "SystemExit: 3"),
        ("forward", "exit3", 1, "the process exited with code 3"),
        ("backward3", "memory", 3, "ran out of memory in step 3, in its backward phase"),
        ("save4", "exit0", 4, "in step 4, in its save phase"),
        ("end", "exit0", None, "the process exited with code 0"),
    ],
)
def test_a_fault_happens_where_it_is_planted(
    rlexp: Shell, tmp_path: Path, where: str, how: str, step: int | None, said: str
) -> None:
    answer = rlexp(*RUN, **planted(f"rank=1,where={where},how={how}", tmp_path))
    assert answer.returncode == 1, answer.stderr
    (fault,) = struck(tmp_path)
    assert (fault["rank"], fault["where"], fault["step"], fault["how"]) == (1, where.rstrip("0123456789"), step, how)
    assert said in answer.stderr
    assert said in run_json(tmp_path / "run")["reason"]
    if step:
        assert steps_of(tmp_path / "run") == list(range(1, step + (where == "save4")))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "state"), [("hang", "S"), ("stop", "T")])
def test_a_rank_that_hangs_is_there_and_does_nothing(tmp_path: Path, how: str, state: str) -> None:
    env = os.environ | planted(f"rank=1,where=step3,how={how}", tmp_path)
    process = warm.start("rlexp", [*RUN, "launch.timeout_seconds=100"], tmp_path, env=env)
    try:
        (fault,) = wait_for(lambda: struck(tmp_path), 60)
        time.sleep(1)
        stat = Path(f"/proc/{fault['pid']}/stat")  # it wakes now and then, to sleep again
        assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, 30, every=0.01)
        assert steps_of(tmp_path / "run") == [1, 2]
    finally:
        everyone = [process.pid, *descendants(process.pid)]
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):  # the launcher's end is theirs
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert gone(everyone, within=240)


@pytest.mark.parametrize("how", ["hang", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_the_others_wait_for_is_named(rlexp: Shell, tmp_path: Path, how: str) -> None:
    """Each rank watches whether any gets further: the message comes in time, with rank and step."""
    answer = rlexp(*RUN, "launch.timeout_seconds=15", **planted(f"rank=1,where=step3,how={how}", tmp_path))
    assert answer.returncode == 1
    reason = run_json(tmp_path / "run")["reason"]
    assert reason.startswith("rank 1 did not come to a collective that the others had begun")
    assert "Rank 1 was last seen after step 2." in reason
    assert "Waiting: rank 0 in step 3, in its" in reason
    assert "launch.timeout_seconds=15. Behind the others: rank 1; rank 0 waits in step 3" in reason
    assert "rank 1 did not come" in answer.stderr


@pytest.mark.slow
def test_who_cannot_save_trains_on(rlexp: Shell, shell: Shell, tmp_path: Path) -> None:
    """A failed save is reported and ends nothing. No other rank has the fault, nor has a requeued job."""
    answer = shell(*RUN, **planted("rank=1,where=save2,how=raise", tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "rank 1: ZeroDivisionError: on purpose" in answer.stderr
    assert len(struck(tmp_path)) == 1
    again = rlexp(*RUN, "hydra.run.dir=again", **planted("rank=1,where=step1,how=raise,once", tmp_path),
                  SLURM_RESTART_COUNT="1")  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert len(struck(tmp_path)) == 1


def alone(tmp_path: Path, fault: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a process with a fault, as Slurm or torchrun may have started it."""
    return python("-c", "print('alive')", **(planted(fault, tmp_path) | env))


def test_before_anything_is_imported(tmp_path: Path) -> None:
    """The fault hits the step's rank, not the batch script, which is task 0 for Slurm too."""
    fault = "rank=0,where=import,how=kill"
    assert alone(tmp_path, fault, SLURM_PROCID="0", SLURM_STEP_ID="0").returncode == -signal.SIGKILL
    (happened,) = struck(tmp_path)
    assert time.time() - 60 < happened["at"] <= time.time()
    assert alone(tmp_path, fault, RANK="0").returncode == -signal.SIGKILL
    for spared in ({"SLURM_PROCID": "0"}, {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, {"RANK": "1"}, {}):
        assert alone(tmp_path, fault, **spared).stdout == "alive\n"
    assert "ZeroDivisionError" in alone(tmp_path, "rank=0,where=import,how=raise", RANK="0").stderr


@pytest.mark.parametrize("fault", ["rank=0,where=nowhere,how=kill", "rank=0,where=step1,how=sing"])
def test_what_is_no_fault_is_refused(tmp_path: Path, fault: str) -> None:
    assert f"RLEXP_TEST_FAULT={fault}: is not a known fault" in alone(tmp_path, fault, RANK="0").stderr
