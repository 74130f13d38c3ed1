"""A run's folder: the resolved configuration, and run.json with what else must be known to trust the curve."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlexp import __version__
from rlexp.config import load
from rlexp.config.schema import Config
from rlexp.errors import ConfigError

PACKAGES = ("torch", "transformers", "deepspeed", "hydra-core", "omegaconf", "wandb", "numpy")


def create(cfg: Config, run_dir: Path) -> None:
    """Claim the folder: of two runs that want the same one, at the same moment even, one gets it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(run_dir / "run.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        raise ConfigError(
            f"hydra.run.dir={run_dir}: holds a run already, and resuming is not there yet. Give another folder."
        ) from None
    if cfg.parallel.world_size > 1:
        (run_dir / "logs").mkdir(exist_ok=True)
    load.to_file(cfg, run_dir / "config.yaml")
    _write(
        run_dir,
        {
            "status": "running",
            "reason": None,
            "sizes": derived_sizes(cfg),
            "command": sys.argv[1:],
            "started": _now(),
            "ended": None,
            "versions": {"rlexp": __version__, "python": sys.version.split()[0]}
            | {name: _version(name) for name in PACKAGES},
            "git_commit": git_commit(),
        },
    )


def close(run_dir: Path, status: str, reason: str) -> None:
    """`finished`, `failed` or `stopped`, and why."""
    note(run_dir, status=status, reason=reason, ended=_now())


def note(run_dir: Path, **facts: Any) -> None:
    """Add to what run.json says."""
    path = run_dir / "run.json"
    if path.exists():
        _write(run_dir, json.loads(path.read_text(encoding="utf-8")) | facts)


def drop_if_empty(run_dir: Path) -> None:
    """Hydra makes the folder before a configuration can be refused; leave none behind for that."""
    with contextlib.suppress(OSError):
        run_dir.rmdir()
        if run_dir.parent == Path.cwd() / "runs":  # the default, where this would have been the first
            run_dir.parent.rmdir()


def derived_sizes(cfg: Config) -> dict[str, int]:
    """The ledger of sizes: what was asked, and what follows from it."""
    return {
        "world_size": cfg.parallel.world_size,
        "ring_size": cfg.parallel.ring_size,
        "dp_size": cfg.parallel.dp_size,
        "batch_size": cfg.train.batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "grad_acc": cfg.train.grad_acc,
    }


def _write(run_dir: Path, run: dict[str, Any]) -> None:
    """Through a temporary name: a reader never sees half of it."""
    temporary = run_dir / ".run.json.tmp"
    temporary.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, run_dir / "run.json")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, with `+dirty` where it was changed since."""
    here = Path(__file__).resolve().parent.parent.parent
    if not (here / ".git").exists():
        return None

    def git(*args: str) -> str:
        answer = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None
