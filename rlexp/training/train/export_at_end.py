"""Write the trained model at the end of a run, while no rank waits for longer than `launch.timeout_seconds`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TypeVar

from torch import Tensor

from rlexp.base.errors import CheckpointError
from rlexp.base.files import sync
from rlexp.config.checks.adapter import MERGED
from rlexp.config.schema.models import Precision
from rlexp.launch import run_folder, watch
from rlexp.training.model.export import AdapterExport, Export, dtype_of
from rlexp.training.train.build_rollouts import policy_weights
from rlexp.training.train.parts import TrainingRun
from rlexp.training.world.objects import rank0_does

EVERY = 5.0  # seconds after which rank 0 says again that it is still writing

T = TypeVar("T")


def export_run(run: TrainingRun, run_dir: Path, step: int) -> None:
    """Gather the parameters one by one; rank 0 writes a file whenever it holds all of its weights. A collective call.

    The folder gets its name when it is whole. While rank 0 writes, the others hear from it again and again.
    """
    place, unfinished = run_dir / "model", run_dir / ".model-unfinished"
    every = min(EVERY, run.cfg.launch.timeout_seconds / 4)
    began: list[Export | AdapterExport] = []  # on rank 0

    def together(work: Callable[[], T]) -> T:
        return rank0_does(partial(_explained, work, run_dir, unfinished), run.world.size, every)

    def begin() -> frozenset[str]:
        shutil.rmtree(unfinished, ignore_errors=True)
        began.append(export_of(run, unfinished))
        began[0].describe(run.tokenizer)
        return began[0].pauses

    def commit() -> None:
        began[0].close()
        if place.is_dir():
            shutil.rmtree(place)
        unfinished.replace(place)
        sync(run_dir)
        run_folder.note(run_dir, exported_step=step)

    pauses = together(begin)
    for name, weight in weights_to_write(run):
        watch.note()
        for out in began:
            out.add(name, weight)
        if name in pauses:
            together(lambda: began[0].write())
    together(commit)


def alone(run: TrainingRun) -> bool:
    """Say whether the adapter is written, and not a model."""
    return run.engine.policy.adapter is not None and run.cfg.checkpoint.export != MERGED


def weights_to_write(run: TrainingRun) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model, or of the adapter, whole and one by one. A collective call."""
    return policy_weights(run.engine) if alone(run) else run.engine.merged()


def export_of(run: TrainingRun, place: Path) -> Export | AdapterExport:
    policy, chosen = run.engine.policy, run.cfg.checkpoint.export_dtype
    if policy.adapter is not None and alone(run):
        return AdapterExport(policy.adapter, run.cfg.model, dtype_of(chosen), place)
    dtype = dtype_of(chosen, bf16=run.cfg.train.precision is Precision.bf16)
    return Export(policy.model, dtype, place)


def _explained(work: Callable[[], T], run_dir: Path, unfinished: Path) -> T:
    """Do a part of the work. A disk that is full is the user's to put right, and what was written only takes room."""
    try:
        return work()
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"{run_dir / 'model'}: the trained model could not be written ({type(error).__name__}: {error}). Training "
            f"is done. Make room, and start the run again: it only writes the model. Or write it elsewhere: "
            f"python -m rlexp.export {quote(str(run_dir))} --out FOLDER."
        ) from error
