"""Which checkpoint to go on from, and going on from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlexp.checkpoint import folder, tensors
from rlexp.engine.base import Engine
from rlexp.errors import CheckpointError
from rlexp.ring.groups import World


def restore(
    mode: str,
    run_dir: Path,
    engine: Engine,
    shapes: Mapping[str, torch.Size],
    world: World,
    say: Callable[[str], None],
) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint, loaded, and its position. A collective call."""
    found: list[list[Path]] = [folder.candidates(mode, run_dir) if world.rank == 0 else []]
    if world.size > 1:
        dist.broadcast_object_list(found, src=0)
    wrong = []
    for path in found[0]:
        reason = _agreed_fault(path, world)
        if reason is None:
            manifest = folder.read_manifest(path)
            position = folder.read_position(path)
            tensors.load(engine, tensors.Reader(path, manifest), shapes, position["optimizer_steps"])
            return path, position
        wrong.append(reason)
        if world.rank == 0:
            say(f"rlexp: skipped a checkpoint: {reason}\n")
    if wrong:
        raise CheckpointError(
            f"{found[0][0].parent}: none of its checkpoints is whole, so there is nothing to go on from. To begin at "
            f"the first step, give another hydra.run.dir, or remove that folder."
        )
    return None


def _agreed_fault(path: Path, world: World) -> str | None:
    """Every rank reads its part of the files; what any of them found wrong."""
    fault = None
    try:
        manifest = folder.check_sizes(path)
        names = sorted(manifest["files"])
        folder.check_contents(path, names[world.rank :: world.size], manifest)
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{path}: {error}"
    faults: list[str | None] = [fault] * world.size
    if world.size > 1:
        dist.all_gather_object(faults, fault)
    return next((each for each in faults if each), None)
