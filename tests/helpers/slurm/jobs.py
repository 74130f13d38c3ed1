"""Start sweeps on the tests' own Slurm, find the processes of their ranks, and plant faults in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.helpers.runs import jobs_of
from tests.helpers.slurm.lab import Lab
from tests.helpers.slurm.machine import environment, processes, wait_until

T = TypeVar("T")
FAULTY = Path(__file__).resolve().parent / "faulty"
NOTE = "faults.jsonl"
# Small and quick, and in float64, in which all layouts draw one curve.
QUICK = ("launch.device=cpu", "logger=none", "engine=torch", "checkpoint.export=false", "data.size=40",
         "data.eval_size=0", "model.layers=1", "train.precision=fp64", "logger.progress=false")  # fmt: skip


def planted(fault: str, folder: Path) -> dict[str, str]:
    """Return the environment that plants a fault (see `faulty/sitecustomize.py`) in a command and in all processes that
    it starts, through Slurm too. The fault is noted in the folder when it happens."""
    path = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "RLEXP_TEST_FAULT": fault, "RLEXP_TEST_FAULT_NOTE": str(folder / NOTE)}


def struck(folder: Path) -> list[dict[str, Any]]:
    """Return the faults that have happened: rank, where, step, how, at (seconds since 1970) and pid."""
    path = folder / NOTE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def wait_for(ask: Callable[[], T], within: float, told: Callable[[], object] = lambda: "") -> T:
    """Wait until `ask` returns something true, and return it. When it is late, the error shows what `told` returns."""
    values: list[T] = []

    def happens() -> bool:
        values[:] = [ask()]
        return bool(values[0])

    assert wait_until(happens, within, every=0.1), f"not within {within:g} s: {told()}"
    return values[0]


class Sweep:
    """`python -m rlexp -m … hydra/launcher=slurm`, started in `folder`; its jobs are in `folder/sw`."""

    def __init__(self, lab: Lab, folder: Path, *overrides: str, fault: str | None = None, **env: str) -> None:
        self.lab, self.folder = lab, folder / "sw"
        self._said = folder / "launcher.log"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        own |= lab.env() | (planted(fault, folder) if fault else {}) | env
        with self._said.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlexp", "-m", "hydra/launcher=slurm", "hydra.sweep.dir=sw", *overrides],
                cwd=folder, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def said(self) -> str:
        """The output of this launcher, and of earlier launchers in this folder."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def wait(self, within: float) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the sweep did not end within {within:g} s: {self.told()}") from None

    def kill(self) -> None:
        """Kill the launcher. Its jobs go on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def jobs(self) -> list[dict]:
        return jobs_of(self.folder) if (self.folder / "sweep.json").exists() else []

    def run_dir(self, number: int) -> Path:
        return self.folder / str(self.jobs()[number]["folder"])

    def told(self) -> str:
        """Return what is needed to find out why a test failed."""
        return f"{self.lab.run('squeue', '--states=all')}\n{self.lab.states()}\n{self.jobs()}\n{self.said[-3000:]}"


def rank_pids(job: str = "", lab: Lab | None = None) -> dict[int, int]:
    """Return the process of each rank of a Slurm job (`12`, or `12_3` of an array), or of the only job that runs. With
    `lab`, processes of other labs on this machine are left out."""
    pids: dict[int, int] = {}
    table = processes()
    for pid in sorted(table):
        known = environment(pid)
        array = f"{known.get('SLURM_ARRAY_JOB_ID')}_{known.get('SLURM_ARRAY_TASK_ID')}"
        if lab is not None and known.get("SLURM_CONF") != str(lab.conf):
            continue
        if "SLURM_STEP_ID" not in known or (job and job not in (known.get("SLURM_JOB_ID"), array)):
            continue
        # A rank may be started by a shell and start processes of its own: it is the outermost Python.
        if table[pid].name.startswith("python") and not _is_python(table[pid].parent):
            rank = int(known["SLURM_PROCID"])
            assert rank not in pids, f"two processes are rank {rank}: {pids[rank]} and {pid}"
            pids[rank] = pid
    return dict(sorted(pids.items()))


def _is_python(pid: int) -> bool:
    process = processes().get(pid)
    return process is not None and process.name.startswith("python") and "SLURM_STEP_ID" in environment(pid)
