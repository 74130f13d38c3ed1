"""Choose the checkpoint to resume from, and load it. Each rank reads only the runs of elements that it needs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlexp.base.errors import CheckpointError
from rlexp.launch import watch
from rlexp.run_files import checkpoint_folder
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
            load(engine, Reader(path, checkpoint_folder.read_manifest(path)), position["optimizer_steps"])
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


# ---- weights and moments, whichever rank held them ----


@dataclass(frozen=True)
class _Elements:
    file: Path
    start: int
    stop: int


class Reader:
    """Read runs of elements by parameter name, from all files of a checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Mapping[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.shapes = {name: torch.Size(shape) for name, shape in manifest["parameters"].items()}
        self._runs: dict[str, list[_Elements]] = {}
        self._open: dict[Path, Any] = {}
        for path in (checkpoint / name for name in manifest["files"] if name.endswith(".safetensors")):
            file = self._open[path] = safe_open(path, framework="pt")
            starts = json.loads(file.metadata()["starts"])
            for key in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                (length,) = file.get_slice(key).get_shape()
                self._runs.setdefault(key, []).append(_Elements(path, starts[key], starts[key] + length))

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flattened parameter or moment, in the dtype of the file."""
        pieces, reached = [], start
        for run in sorted(self._runs.get(f"{kind}/{name}", []), key=lambda run: run.start):
            if run.stop <= reached or run.start >= stop:
                continue
            if run.start > reached:
                break
            upto = min(run.stop, stop)
            pieces.append(self._open[run.file].get_slice(f"{kind}/{name}")[reached - run.start : upto - run.start])
            reached = upto
        if reached < stop:
            raise CheckpointError(f"{self.checkpoint}: holds no {kind} of {name} from element {reached} on.")
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def whole(self, kind: str, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.read(kind, name, 0, math.prod(shape)).view(shape)


def load(engine: Engine, reader: Reader, steps: int) -> None:
    """Load a checkpoint into an engine. It may come from another engine and number of ranks. A collective call."""
    check_shapes(reader, engine)
    for fragment in engine.fragments():
        for kind, tensor in fragment.tensors():
            watch.note()
            tensor.copy_(reader.read(kind, fragment.name, fragment.start, fragment.start + tensor.numel()))
    engine.restored(steps)


def check_shapes(reader: Reader, engine: Engine) -> None:
    """Refuse a checkpoint whose parameters have other names or shapes, and name the first that differs."""
    shapes = engine.shapes()
    for name in [*shapes, *(name for name in reader.shapes if not name.startswith(engine.leaves))]:
        saved, here = reader.shapes.get(name), shapes.get(name)
        if saved != here:
            what = "is not trained here" if here is None else f"is {list(here)} here"
            was = "is not in it" if saved is None else f"is {list(saved)} in it"
            raise CheckpointError(f"{reader.checkpoint}: is of another model: {name} {was}, and {what}.")
