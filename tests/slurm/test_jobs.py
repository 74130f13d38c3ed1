"""The tests' tools: start a sweep on two nodes, find its ranks, stop one and let it go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bench.resume import curve_of
from tests.helpers.runs import steps_of
from tests.helpers.slurm.jobs import QUICK, Sweep, rank_pids, struck, wait_for
from tests.helpers.slurm.lab import Lab


@pytest.mark.prove
def test_a_rank_of_a_sweep_is_found_and_stopped_and_goes_on(lab: Lab, tmp_path: Path) -> None:
    shape = ("parallel=ring4", "launch.nodes=2", "launch.nproc=2", "train.max_steps=4")
    with Sweep(lab, tmp_path, *QUICK, *shape, fault="rank=3,where=step3,how=stop") as sweep:
        (fault,) = wait_for(lambda: struck(tmp_path), 150, sweep.told)
        pids = rank_pids(lab=lab)
        assert [*pids] == [0, 1, 2, 3], pids
        assert pids[3] == fault["pid"]
        assert steps_of(sweep.run_dir(0)) == [1, 2]
        os.kill(pids[3], signal.SIGCONT)
        assert sweep.wait(100) == 0, sweep.told()
        assert [job["status"] for job in sweep.jobs()] == ["finished"]
        assert len(curve_of(sweep.run_dir(0)).rows) == 4
        assert wait_for(lambda: not rank_pids(lab=lab), 10) is True
