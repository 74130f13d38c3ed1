"""Start runs as a user does, with W&B's client and without the machine's account."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rlexp.run_files.checkpoint_folder import latest_first
from tests.helpers import warm
from tests.helpers.runs import descendants, gone, wait_for

ARGS = ("launch.device=cpu", "engine=torch", "checkpoint.export=false", "logger.progress=false", "train.batch_size=2",
        "data.size=100", "data.eval_size=4")  # fmt: skip
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"} | {"NETRC": "/dev/null"}
Env = dict[str, str]


def begin(folder: Path, *overrides: str, env: Env = CLEAN, run: str = "run") -> warm.Process:
    """Build a command for a run that is watched while it trains."""
    return warm.start("rlexp", [*ARGS, f"hydra.run.dir={run}", *overrides], folder, env=env)


def train(folder: Path, *overrides: str, env: Env = CLEAN, run: str = "run") -> subprocess.CompletedProcess[str]:
    return warm.run("rlexp", [*ARGS, f"hydra.run.dir={run}", *overrides], folder, env=env)


def kill_after(rows: int, folder: Path, *overrides: str, env: Env = CLEAN) -> None:
    """Start a run, and kill its launcher and with it all its processes, some rows after its last checkpoint."""
    process = begin(folder, "train.max_steps=100000", *overrides, env=env)
    run = folder / "run"
    wait_for(lambda: len(curve_of(run)) >= rows and bool(latest_first(run)), process)
    everyone = descendants(process.pid)  # the ranks, and the client, which writes what it has before it ends
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=240)
    assert gone(everyone, within=240)


def curve_of(run_dir: Path) -> list[dict[str, float]]:
    """Read the whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def values_of(row: dict[str, object]) -> dict[str, object]:
    """Return a row without the step and without W&B's own keys."""
    return {name: value for name, value in row.items() if name != "step" and not name.startswith("_")}


def wandb(*args: str, env: Env = CLEAN) -> str:
    """Run the client's own command line. It writes logs beside the folder that is named last."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", *args],
        cwd=Path(args[-1]).parent, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(fragment: Path, kind: str) -> list[dict]:
    """Read the records of one type with W&B's own reader."""
    lines = wandb("leet", "inspect", "--json", str(fragment)).splitlines()
    return [record[kind] for record in map(json.loads, lines) if record["type"] == kind]
