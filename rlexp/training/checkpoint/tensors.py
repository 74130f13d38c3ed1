"""Weights and moments on disk: runs of elements by parameter name, independent of the rank that held them.

A rank writes the state that only it holds, and an equal share of replicated state. So the files of any engine on any
number of ranks can be read by any other, and each rank reads only the runs it needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlexp.base.errors import CheckpointError
from rlexp.launch import watch
from rlexp.training.engine.base import Engine, Fragment


def share(engine: Engine, rank: int, world_size: int) -> list[Fragment]:
    """Return what this rank writes: its fragments, or an equal part of them where all ranks hold the same."""
    fragments = engine.fragments()
    if not engine.replicated:
        return fragments
    total = sum(fragment.weight.numel() for fragment in fragments)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    pieces, passed = [], 0
    for fragment in fragments:
        low = max(first - passed, 0)
        high = min(last - passed, fragment.weight.numel())
        if low < high:
            moments = {moment: tensor[low:high] for moment, tensor in fragment.moments.items()}
            pieces.append(Fragment(fragment.name, fragment.start + low, fragment.weight[low:high], moments))
        passed += fragment.weight.numel()
    return pieces


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
        for name in manifest["files"]:
            if name.endswith(".safetensors"):
                self._index(checkpoint / name)

    def _index(self, path: Path) -> None:
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
