"""Write one checkpoint at a time, in the background of training.

Training pauses while the state is copied to the host's memory. A thread of each rank writes its files; collectives run
only in the main threads. When every rank has written, at the end of a later step or of the run, all ranks tell
rank 0 what they wrote, and rank 0 gives the folder its name. If a rank failed, all learn it, and the files are removed.

A rank writes the state that only it holds, and an equal share of replicated state: runs of elements by parameter name.
So the files of any engine on any number of ranks can be read by any other.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlexp.base.files import sync
from rlexp.launch import watch
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint.host_copy import HostCopy, Laid
from rlexp.training.engine.base import Engine, Fragment
from rlexp.training.world.groups import World
from rlexp.training.world.objects import from_rank0, gather_objects

Describe = Callable[[Path], Sequence[Path]]  # writes a rank's other files; rank 0 writes the position


class Saver:
    """`most` bounds the bytes of the host's memory that this rank's copy takes; None: as many as its state has."""

    def __init__(
        self, engine: Engine, world: World, run_dir: Path, facts: dict[str, Any], most: int | None = None
    ) -> None:
        self._engine, self._world, self._run_dir, self._facts = engine, world, run_dir, facts
        self._host = HostCopy(most)
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._step = 0
        self._files: dict[str, dict[str, Any]] = {}
        self._error: str | None = None

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is begun and not yet committed. The same on every rank."""
        return self._thread is not None

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self) -> None:
        """Allocate the host's memory in the background. Call it after the first step, when all state exists."""
        laid = self._laid()

        def work() -> None:
            with contextlib.suppress(Exception):  # the save itself will fail in the same way, and report it
                self._host.prepare(laid)

        self._preparing = threading.Thread(target=work, daemon=True)
        self._preparing.start()

    def begin(self, step: int, describe: Describe) -> None:
        """Copy the state and start writing it. Returns as soon as training may change the state again."""
        assert not self.pending, "the previous checkpoint is not settled yet"
        if self._preparing is not None:
            with watch.elsewhere():
                self._preparing.join()
        self._step, self._files, self._error = step, {}, None
        laid: Laid | None = None
        with self._handing_over():
            laid = self._laid()
        self._host.begin()

        def work() -> None:
            with self._handing_over():
                if laid is not None:
                    self._files = self._write(step, laid.header(), describe)
            self._host.let_go()

        self._thread = threading.Thread(target=work, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        with self._handing_over():
            self._host.copy(laid)  # which also tells the thread when nothing more comes

    def _laid(self) -> Laid:
        """Lay this rank's share of the state by key (`weight/NAME`)."""
        tensors, starts = {}, {}
        for fragment in share(self._engine, self._world.rank, self._world.size):
            for kind, tensor in fragment.tensors():
                key = f"{kind}/{fragment.name}"
                tensors[key], starts[key] = tensor, fragment.start
        return Laid.of(tensors, starts)

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[None]:
        """Remember the first error for `settle` to report. A failed save does not end training."""
        try:
            yield
        except Exception as error:
            self._error = self._error or f"rank {self._world.rank}: {type(error).__name__}: {error}"

    def _write(self, step: int, header: bytes, describe: Describe) -> dict[str, dict[str, Any]]:
        place = checkpoint_folder.unfinished(self._run_dir, step)
        place.mkdir(parents=True, exist_ok=True)
        state_file = place / f"state-{self._world.rank:05d}-of-{self._world.size:05d}.safetensors"
        with state_file.open("wb") as file:
            file.write(header)
            self._host.drain(file.write)
        written = [state_file, *describe(place)]
        for path in {*written, *(path.parent for path in written)}:
            sync(path)
        return {str(path.relative_to(place)): checkpoint_folder.described(path) for path in written}

    def settle(self) -> str | None:
        """Wait until all ranks have written, and commit. Return the error, equal on every rank. A collective call."""
        if self._thread is None:
            return None
        with watch.elsewhere(f"the disk, which has not taken the checkpoint of step {self._step},"):  # no rank hangs
            self._thread.join()
        self._thread = None
        outcomes = gather_objects((self._error, self._files), self._world.size)
        failed = next((error for error, _ in outcomes if error), None)
        if self._world.rank == 0:
            with watch.elsewhere():
                failed = self._commit(failed, {name: entry for _, files in outcomes for name, entry in files.items()})
        return from_rank0(failed, self._world.size)

    def _commit(self, failed: str | None, files: dict[str, dict[str, Any]]) -> str | None:
        if failed is None:
            try:
                checkpoint_folder.commit(self._run_dir, self._step, files, self._facts)
                return None
            except OSError as error:
                failed = f"rank 0: {type(error).__name__}: {error}"
        shutil.rmtree(checkpoint_folder.unfinished(self._run_dir, self._step), ignore_errors=True)
        return failed


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
