"""Compute a reference's log-probabilities before training, unless they are kept on this machine already.

All ranks compute together over their rings, by the code of a reference in memory. Rank 0 appends what is ready, in
parts of whole rows, to a folder in the making, so a run that was killed goes on there; it holds a lock while all ranks
compute, so two jobs that start together compute it once. In the end the first rank of each machine has the folder.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlexp.base.cache import locked
from rlexp.base.errors import DataError
from rlexp.base.file_hashes import files_in
from rlexp.base.files import sync
from rlexp.base.made_once import BLOCK, Appending, in_the_making, is_whole, making
from rlexp.base.waiting import progress
from rlexp.config.checks.micro_batches import at_once
from rlexp.config.schema import Config, ModelConfig
from rlexp.training.dealer.deal import unit_of
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.prepared import commit_of, of_hub
from rlexp.training.reference import stored
from rlexp.training.reference.models import OfModel, Reference
from rlexp.training.reference.stored import Kept, ReferenceRows, SequenceValues, Stored, appended
from rlexp.training.rollout.experience import off_pack
from rlexp.training.sinks.console import say
from rlexp.training.train.parts import Setting
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.task import Task
from rlexp.training.types import Floats
from rlexp.training.world.objects import gather_objects, leaders_of, rank0_does, some_do

T = TypeVar("T")
PART = 256  # rows of a part, or more, so that each replica has a whole micro-batch of it
HASHED = 1024  # rows that a rank hashes at once


def precomputed(
    setting: Setting, task: Task, model: ModelConfig, load: Callable[[], Frozen], *, trains: bool
) -> Reference:
    """Return the reference of a run, computed if it is not kept. `load` loads and freezes the model, which is gone
    again at the end. A collective call."""
    assert isinstance(task, RowsTask)
    cfg = setting.cfg
    keeper = _Keeper(setting, task, load)
    kept = []
    for rows in rows_of(task, cfg, setting.schedule.total_steps, trains=trains):
        sequences = shared_digest(rows, setting)
        # All machines have the same key. The model's own files are read here, so an error is not the cache's.
        facts = rank0_does(partial(_facts, cfg, model, sequences), setting.world.size)
        kept.append(Kept(rows, SequenceValues.mapped(keeper.ensured(rows, facts), cfg.train.precision)))
    keeper.forget_model()
    return Stored(kept, cfg.train.precision)


def _facts(cfg: Config, model: ModelConfig, sequences: str) -> dict[str, Any]:
    commit = commit_of(model)
    if commit is None and (on_hub := of_hub(model)) is not None:
        raise DataError(
            f"reference=precompute: cannot tell which commit of {on_hub.path} is in this machine's cache, and another "
            f"one would have other log-probabilities. Give the model's folder, or use reference=model."
        )
    try:
        return stored.facts_of(cfg, model, commit, sequences)
    except OSError as error:
        raise DataError(
            f"reference=precompute: a file of the model cannot be read ({error}). Make it readable."
        ) from None


def rows_of(task: RowsTask, cfg: Config, total_steps: int, *, trains: bool) -> list[ReferenceRows]:
    """Return the rows that a run asks for: those that its steps take, and those held out if it evaluates any."""
    evaluates = not trains or cfg.train.eval_every is not None or cfg.eval.before_training
    train = [ReferenceRows(False, task.examples.train, places_of(task, total_steps))] if trains else []
    held_out = [ReferenceRows(True, task.examples.held_out)] if evaluates else []
    return [rows for rows in (*train, *held_out) if len(rows)]


def places_of(task: RowsTask, total_steps: int) -> np.ndarray | None:
    """Return the places of the examples that the steps take; None: all.

    An epoch of all samples counts as all, though a tail may be left out: the key is then the same for every seed.
    """
    sampler, steps = task.sampler, total_steps if task.most_steps is None else min(total_steps, task.most_steps)
    if steps >= sampler.steps_per_epoch and sampler.taken == sampler.size:
        return None
    taken = np.zeros(sampler.size, dtype=np.bool_)
    for batch in sampler.batches(1, steps):
        taken[list(batch.indices)] = True
    return None if taken.all() else np.flatnonzero(taken)


def shared_digest(rows: ReferenceRows, setting: Setting) -> str:
    """Hash the tokens of all rows, each rank a part of them. A collective call."""
    world = setting.world
    blocks = range(-(-len(rows) // HASHED))
    own_digests = {
        block: stored.digest_of(rows[number] for number in range(block * HASHED, min(len(rows), (block + 1) * HASHED)))
        for block in blocks[world.rank :: world.size]
    }
    digests = {block: each for part in gather_objects(own_digests, world.size) for block, each in part.items()}
    return hashlib.sha256(b"".join(digests[block] for block in blocks)).hexdigest()


@dataclass
class _Keeper:
    """Finds what is kept, and makes the rest. Its methods are collective calls."""

    setting: Setting
    task: RowsTask
    load: Callable[[], Frozen]
    reference: OfModel | None = None  # from its first use on

    def __post_init__(self) -> None:
        self.cfg, self.world = self.setting.cfg, self.setting.world
        self.folder = stored.cache_of(self.cfg) / "reference"
        leaders = leaders_of(self.folder, partial(_refusal, self.cfg), self.world.size)
        self.leads = leaders[self.world.rank] == self.world.rank
        self.shown = self.cfg.logger.progress and self.world.rank == 0

    def ensured(self, rows: ReferenceRows, facts: dict[str, Any]) -> Path:
        """Return the folder of these rows, made if there is none, or a damaged one."""
        place = self.folder / stored.key_of(facts)
        what = f"{len(rows):,} {'held-out ' if rows.held_out else ''}{self.task.kind}s"
        if all(each is not False for each in self.leaders_do(lambda: is_whole(place))):
            self.say(f"the log-probabilities of {what} are in {place}.")
            return place
        waits = f"waits for another run that computes the reference of the same {self.task.kind}s."
        with contextlib.ExitStack() as held:  # rank 0's; it may wait for a long time, and the others meet meanwhile
            if self.rank0_does(lambda: held.enter_context(making(place, waits)) is not None):
                self.say(f"computes the log-probabilities of {what} once, and keeps them in {place}.")
                self.make(rows, in_the_making(place), facts)
            self.rank0_does(held.close)
        self.spread(place)
        return place

    def make(self, rows: ReferenceRows, folder: Path, facts: dict[str, Any]) -> None:
        """Compute all rows that are not there yet."""
        size, parts = self.world.dp_size * (at_once(self.cfg).samples or 1), list[Appending]()  # rank 0's only one

        def begin() -> int:
            parts.append(Appending(folder, stored.types_of(self.cfg.train.precision)))
            return int(parts[0].facts[-1]) if parts[0].facts else 0

        def append(arrays: Sequence[Floats], last: int) -> None:
            appended(parts[0], arrays, last)

        try:
            first = self.rank0_does(begin)
            bar = {"total": len(rows), "initial": first, "desc": "reference", "unit": self.task.kind}
            with self.setting.phases("reference"), progress(self.shown, **bar) as show:
                while first < len(rows):
                    last = min(len(rows), first + -(-PART // size) * size)
                    arrays = self.values(rows, first, last)
                    assert len(arrays) == (last - first) * len(self.task.sides)
                    self.rank0_does(partial(append, arrays, last))
                    show(last - first)
                    first = last
            self.rank0_does(lambda: parts[0].finish({"of": facts}))
        finally:
            for each in parts:
                each.close()

    @torch.no_grad()
    def values(self, rows: ReferenceRows, first: int, last: int) -> list[Floats]:
        """Compute the log-probabilities of the trained tokens of some rows' sequences."""
        setting, world = self.setting, self.world
        own_logps: list[tuple[int, Sequence[Floats]]] = []
        if self.reference is None:
            self.reference = OfModel(self.load())
        dealt = setting.dealer.deal_all(last - first, lambda place: unit_of(rows[first + place]))
        for places in dealt.packs[world.replica]:
            pack = pack_examples([rows[first + place] for place in places], **setting.padding)
            shard = setting.to_device(pack)
            of_sequences = off_pack(pack, shard, self.reference.logps(shard))
            sides = len(self.task.sides)
            own_logps += ((place, of_sequences[at * sides : (at + 1) * sides]) for at, place in enumerate(places))
        parts = gather_objects(own_logps if world.ring.rank == 0 else [], world.size)
        by_place = dict(chain.from_iterable(parts))
        return [each for place in range(last - first) for each in by_place[place]]

    def spread(self, place: Path) -> None:
        """Copy rank 0's folder to the machines that do not see it."""
        lacking = self.leaders_do(lambda: not is_whole(place))
        if not any(lacking):
            return
        lacks = bool(lacking[self.world.rank])
        copy = place.with_name(f".{place.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            self.do(partial(_emptied, copy) if lacks else None)
            for name, size in self.rank0_does(
                lambda: {each.name: each.stat().st_size for each in files_in(place)}
            ).items():
                for start in range(0, max(1, size), BLOCK):
                    block = self.rank0_does(partial(_block, place / name, start))
                    self.do(partial(_append, copy / name, block) if lacks else None)
            self.do(partial(_named, copy, place) if lacks else None)
        finally:
            if lacks:
                shutil.rmtree(copy, ignore_errors=True)
        if not all(each is not False for each in self.leaders_do(lambda: is_whole(place))):
            raise DataError(f"{place}: the copy on another machine is not what was sent. Start the run again.")

    def forget_model(self) -> None:
        """Give back the model's memory."""
        if self.reference is None:
            return
        release_pieces(self.reference.frozen)
        self.reference = None
        gc.collect()  # engines and modules refer to each other
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- ranks, and words ----

    def do(self, work: Callable[[], T] | None) -> list[T | None]:
        """Run work that touches the cache on the ranks that have some; any rank's error is every rank's."""
        return some_do(None if work is None else lambda: self.writing(work), self.world.size)

    def leaders_do(self, work: Callable[[], T]) -> list[T | None]:
        return self.do(work if self.leads else None)

    def rank0_does(self, work: Callable[[], T]) -> T:
        return rank0_does(lambda: self.writing(work), self.world.size)

    def writing(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise DataError(_refusal(self.cfg, error)) from None

    def say(self, text: str) -> None:
        if self.shown:
            say(f"rlexp: reference: {text}\n")


def release_pieces(frozen: Frozen) -> None:
    """Empty weights that DeepSpeed's stage 3 holds.

    Shim: DeepSpeed's `PartitionedParameterCoordinator` remembers by `functools.lru_cache` what it releases behind each
    module, and with it the modules, for as long as the process lives. Remove this when it forgets engines that are
    gone.
    """
    for parameter in frozen.policy.parameters():
        if (piece := getattr(parameter, "ds_tensor", None)) is not None:
            for held in (parameter, piece):
                held.data = held.data.new_empty(0)


def _emptied(copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)  # of a process of the same name and number
    copy.mkdir()


def _block(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(BLOCK)


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def _named(copy: Path, place: Path) -> None:
    """Give a copy its name, unless another run, or another machine of the same disk, has made the folder meanwhile."""
    for path in (*files_in(copy), copy):
        sync(path)
    with locked(place):
        if not is_whole(place):
            shutil.rmtree(place, ignore_errors=True)  # a damaged one
            copy.rename(place)


def _refusal(cfg: Config, error: OSError) -> str:
    own = hasattr(cfg.data, "cache")
    key, remedy = (
        ("data.cache", "data.cache=FOLDER") if own else ("RLEXP_CACHE", "RLEXP_CACHE=FOLDER before the command")
    )
    where = f"{key}={stored.cache_of(cfg)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{where}: has no room for the log-probabilities of reference=precompute ({error.strerror}). "
            f"Free some and start again: it continues where it stopped. Or give another folder: {remedy}."
        )
    return (
        f"{where}: cannot be written ({error.strerror}), and reference=precompute keeps "
        f"log-probabilities there. Give a folder where you may write: {remedy}; or use reference=model."
    )
