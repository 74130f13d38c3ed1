"""Functions that spawned ranks run for the tests, and how to start them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engines import SpyEngine
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec, join, launch_on
from rlexp.launch.local import PRELOAD, run_ranks

TIMEOUT = 240.0
COLLECTIVE_TIMEOUT = 120.0  # the watch names who hangs before TIMEOUT


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(place, *args)` on gloo ranks that have joined; what each returned."""
    return run_ranks(_joined, world_size, (function, args), preload=(*PRELOAD, "deepspeed"), timeout=TIMEOUT)


def _joined(spec: RankSpec, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    join(spec, launch_on("cpu", COLLECTIVE_TIMEOUT))
    return function(spec, *args)


class SpyLoss:
    """A loss that keeps the log-probabilities of each pair that it is given."""

    def __init__(self, loss: Any) -> None:
        self._loss, self.wanted = loss, loss.wanted
        self.chosen: list[float] = []
        self.rejected: list[float] = []

    def __call__(self, values: Any) -> Any:
        self.chosen += values.logps["chosen"].tolist()
        self.rejected += values.logps["rejected"].tolist()
        return self._loss(values)


@dataclasses.dataclass
class Steps:
    rows: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    chosen: list[float]  # of this rank's replica, in the order of its samples
    rejected: list[float]
    weights: dict[str, Tensor]
    start: dict[str, Tensor]  # the weights before the first step


def train_steps(spec: RankSpec, cfg: Config, steps: int) -> Steps:
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    task = build(cfg, around=UNPROBED)
    engine, loss = SpyEngine(task.run.engine), SpyLoss(task.loss)
    task.run, task.loss = dataclasses.replace(task.run, engine=engine), loss
    start = weights_of(engine)
    rows = [train_step(task, step) for step in range(1, steps + 1)]
    return Steps(rows, engine.kept, loss.chosen, loss.rejected, weights_of(engine), start)


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: weight.detach().double().cpu().clone() for name, weight in engine.weights()}


def begin_saving(run: Any, folder: Path, step: int) -> Callable[[], Any]:
    """Begin to save the engine's state. What is returned waits for the files, and returns a reader of them."""
    from rlexp.run_files.checkpoint_folder import folder_of, read_manifest
    from rlexp.training.checkpoint.restore import Reader
    from rlexp.training.checkpoint.saver import Saver

    def nothing_else(at: Path) -> list[Path]:
        paths = [at / name for name in ("position.json", "metrics.jsonl")] if run.world.rank == 0 else []
        for path in paths:
            path.touch()
        return paths

    shapes = {name: list(shape) for name, shape in run.engine.shapes().items()}
    saver = Saver(run.engine, run.world, folder, {"parameters": shapes})
    saver.begin(step, nothing_else)

    def saved() -> Any:
        assert saver.settle() is None
        return Reader(folder_of(folder, step), read_manifest(folder_of(folder, step)))

    return saved


def largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, relative to the largest element of each tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
