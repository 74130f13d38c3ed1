"""Choose the checkpoint to resume from, and load it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlexp.base.errors import CheckpointError
from rlexp.launch import watch
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint import tensors
from rlexp.training.engine.base import Engine
from rlexp.training.world.groups import World
from rlexp.training.world.objects import from_rank0, gather_objects


def restore(
    mode: str, run_dir: Path, engine: Engine, world: World, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest whole checkpoint; return its path and position, or None without one. A collective call."""
    candidates = from_rank0(checkpoint_folder.candidates(mode, run_dir) if world.rank == 0 else [], world.size)
    damaged: list[Path] = []
    for path in candidates:
        reason = _agreed_fault(path, world)
        if reason is None:
            if world.rank == 0:
                _set_aside(damaged, run_dir)
            position = checkpoint_folder.read_position(path)
            reader = tensors.Reader(path, checkpoint_folder.read_manifest(path))
            tensors.load(engine, reader, position["optimizer_steps"])
            return path, position
        damaged.append(path)
        if world.rank == 0:
            say(f"rlexp: skipped a checkpoint: {reason}\n")
    if damaged:
        names = ", ".join(path.name for path in damaged)
        remedy = (
            f"To begin at the first step, give another hydra.run.dir, or remove {run_dir / checkpoint_folder.FOLDER}."
            if damaged[0].parent == run_dir / checkpoint_folder.FOLDER
            else f"Give another run or checkpoint than {mode}."
        )
        raise CheckpointError(f"{damaged[0].parent}: has no whole checkpoint: {names} cannot be used. {remedy}")
    return None


def _set_aside(damaged: list[Path], run_dir: Path) -> None:
    """Rename this run's own damaged checkpoints. They would otherwise count as the newest when old ones are removed."""
    for path in damaged:
        if path.parent == run_dir / checkpoint_folder.FOLDER:
            with contextlib.suppress(OSError):
                checkpoint_folder.set_aside(path)


def _agreed_fault(path: Path, world: World) -> str | None:
    """Let every rank check its part of the files. Return the first fault that any rank found."""
    fault = None
    try:
        with watch.elsewhere():  # all files are read whole
            manifest = checkpoint_folder.check_sizes(path)
            names = sorted(manifest["files"])
            checkpoint_folder.check_contents(path, names[world.rank :: world.size], manifest)
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{path}: {error}"
    return next((each for each in gather_objects(fault, world.size) if each), None)
