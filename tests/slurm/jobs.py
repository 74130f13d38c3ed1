"""Sweeps through a Slurm of the tests' own, the processes of their ranks, and faults planted in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.runs import jobs_of
from tests.slurm.lab import Lab
from tests.slurm.machine import environment, processes, wait_until

T = TypeVar("T")
FAULTY = Path(__file__).resolve().parent / "faulty"
NOTE = "faults.jsonl"
# Small and quick, and in float64, where the curves of all layouts are one.
QUICK = ("launch.device=cpu", "logger=none", "engine=torch", "checkpoint.export=false", "data.size=40",
         "data.eval_size=0", "model.layers=1", "train.precision=fp64", "logger.progress=false")  # fmt: skip


def planted(fault: str, folder: Path) -> dict[str, str]:
    """The environment of a command whose ranks have a fault, as `faulty/sitecustomize.py` knows it. Processes that it
    starts have it too, through Slurm as well. What happened is noted in the folder."""
    path = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "RLEXP_TEST_FAULT": fault, "RLEXP_TEST_FAULT_NOTE": str(folder / NOTE)}


def struck(folder: Path) -> list[dict[str, Any]]:
    """The faults that have happened: rank, where, step, how, at (seconds since 1970) and the pid."""
    path = folder / NOTE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def wait_for(found: Callable[[], T], within: float, told: Callable[[], object] = lambda: "") -> T:
    """Until it is something; what that is. When it is late, the error says what `told` answers then."""
    values: list[T] = []

    def happens() -> bool:
        values[:] = [found()]
        return bool(values[0])

    assert wait_until(happens, within, every=0.1), f"not within {within:g} s: {told()}"
    return values[0]


class Sweep:
    """`python -m rlexp -m … hydra/launcher=slurm`, started in `folder`, its jobs in `folder/sw`."""

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
        """Of the launcher, and of the one before it in this folder."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def wait(self, within: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the sweep did not end within {within:g} s: {self.told()}") from None

    def kill(self) -> None:
        """The launcher; its jobs go on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def jobs(self) -> list[dict]:
        return jobs_of(self.folder) if (self.folder / "sweep.json").exists() else []

    def run_dir(self, number: int) -> Path:
        return self.folder / str(self.jobs()[number]["folder"])

    def told(self) -> str:
        """For whoever must find out why a test has failed."""
        return f"{self.lab.run('squeue', '--states=all')}\n{self.lab.states()}\n{self.jobs()}\n{self.said[-3000:]}"


def rank_pids(job: str = "", lab: Lab | None = None) -> dict[int, int]:
    """Of each rank of a Slurm job (`12`, or `12_3` of an array), or of the one that runs, its process here. Where
    other labs may be up on this machine, of this one alone."""
    found: dict[int, int] = {}
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
            assert rank not in found, f"two processes are rank {rank}: {found[rank]} and {pid}"
            found[rank] = pid
    return dict(sorted(found.items()))


def _is_python(pid: int) -> bool:
    process = processes().get(pid)
    return process is not None and process.name.startswith("python") and "SLURM_STEP_ID" in environment(pid)
