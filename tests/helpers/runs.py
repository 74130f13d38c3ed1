"""Read runs, sweeps and their processes from outside, and write as much of a run as others read."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rlexp.config.load import compose_config, to_plain
from tests.helpers import warm
from tests.helpers.slurm.machine import below, free_ports, processes, wait_until


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the whole lines of a curve; the last may be half written."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(folder: Path) -> list[int]:
    """Return the steps of a curve, as far as it is written."""
    return [int(row["step"]) for row in rows_of(folder)] if (folder / "metrics.jsonl").exists() else []


def a_run_of(folder: Path, *words: str) -> str:
    """Write a run's folder with all of its checkpoint that says what was asked for."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    config = to_plain(compose_config(["launch.device=cpu", *words]))
    (checkpoint / "position.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    return str(folder / "run")


def value_of(plain: Any, key: str) -> Any:
    """Return the value of a key of a configuration, as a file has it."""
    return functools.reduce(lambda group, leaf: group[leaf], key.split("."), plain)


def run_json(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def jobs_of(folder: Path) -> list[dict]:
    """Return the jobs in a sweep's ledger."""
    return json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"]


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, without itself."""
    return below(processes(), [pid])


def ranks_of(launcher: int) -> list[int]:
    """Return the ranks that a launcher's fork server has forked."""
    server = next(pid for pid in descendants(launcher) if descendants(pid))
    return sorted(pid for pid, each in processes().items() if each.parent == server)


def gone(pids: Collection[int], within: float) -> bool:
    return wait_until(lambda: not set(pids) & processes().keys(), within, every=0.1)


def wait_for(happens: Callable[[], bool], process: subprocess.Popen[str] | warm.Process) -> None:
    """Wait until something happens, as long as the process lives."""
    deadline = time.monotonic() + 240
    while not happens():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "not within 240 s"
        time.sleep(0.02)


def wait_for_steps(folder: Path, process: subprocess.Popen[str] | warm.Process, steps: int = 2) -> None:
    wait_for(lambda: len(steps_of(folder / "run")) >= steps, process)


def on_two_nodes(folder: Path, *args: str) -> list[tuple[int, str]]:
    """Start rlexp by a torchrun for each of two nodes, both of which are this machine, with two ranks each. Return how
    each ended, and what it printed."""
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_ports(1)}"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={node}", "-m", "rlexp", *args],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    return [(torchrun.wait(), told) for torchrun in started for _, told in [torchrun.communicate(timeout=180)]]
