"""Jobs on this machine through submitit: no more at once than allowed, and none twice when the command is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.runs import jobs_of, steps_of
from tests.helpers.slurm.jobs import QUICK, wait_for
from tests.helpers.slurm.machine import environment, processes
from tests.helpers.slurm.watched import Taken, paced, taken

STEPS, AT_ONCE = 30, 2
SWEEP = ("-m", "hydra/launcher=slurm_local", f"hydra.launcher.jobs_at_once={AT_ONCE}", "hydra.sweep.dir=sw", *QUICK,
         "parallel=ring1", "launch.nproc=1", f"train.max_steps={STEPS}", "train.batch_size=2",
         "data.max_length=224,256,288,320")  # fmt: skip


def begin(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rlexp", *SWEEP], cwd=folder, env=os.environ | paced(0.3, folder),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def by_run(steps: list[Taken]) -> dict[int, list[Taken]]:
    runs: dict[int, list[Taken]] = {}
    for each in steps:
        runs.setdefault(each.pid, []).append(each)
    return runs


def most_at_once(steps: list[Taken]) -> int:
    spans = [(each[0].at, each[-1].at) for each in by_run(steps).values()]
    return max(sum(begun <= at <= ended for begun, ended in spans) for at, _ in spans)


@pytest.mark.slow
def test_a_killed_launcher_of_local_jobs_is_followed_by_another(tmp_path: Path) -> None:
    """Its two jobs go on without it. The next launcher adopts them, and starts the others when there is room."""
    said = lambda: (tmp_path / "log").read_text(encoding="utf-8")[-3000:]  # noqa: E731
    first = begin(tmp_path)
    try:
        wait_for(lambda: len(by_run(taken(tmp_path))) == AT_ONCE, 120, said)
        first.send_signal(signal.SIGKILL)
        first.wait()
        ids = [job["job_id"] for job in jobs_of(tmp_path / "sw")[:AT_ONCE]]
        assert [job["job_id"] for job in jobs_of(tmp_path / "sw")[AT_ONCE:]] == [None] * 2
        second = begin(tmp_path)
        assert second.wait(timeout=400) == 0, said()
        jobs = jobs_of(tmp_path / "sw")
        assert [job["status"] for job in jobs] == ["finished"] * 4, said()
        assert [job["job_id"] for job in jobs[:AT_ONCE]] == ids
        text = (tmp_path / "log").read_text(encoding="utf-8")
        assert text.count("is running already, as job") == AT_ONCE
    finally:
        end_all(tmp_path)
    assert len(by_run(taken(tmp_path))) == 4
    assert sorted(each.step for each in taken(tmp_path)) == sorted([*range(1, STEPS + 1)] * 4)
    assert most_at_once(taken(tmp_path)) == AT_ONCE
    assert all(steps_of(tmp_path / "sw" / job["folder"]) == [*range(1, STEPS + 1)] for job in jobs)
    assert (tmp_path / "sw" / "summary.json").exists()


def end_all(folder: Path) -> None:
    """End every process that was started here, also if the test failed."""
    ours = [pid for pid in processes() if environment(pid).get("RLEXP_TEST_TAKEN", "").startswith(str(folder))]
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.5 if ours else 0)
