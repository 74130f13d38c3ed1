"""Exchange Python objects between ranks: few and small, such as names, counts and errors."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from rlexp.base import cache
from rlexp.base.errors import DataError, UserError
from rlexp.launch import watch

BOOT = Path("/proc/sys/kernel/random/boot_id")
EVERY = 2.0  # seconds between two meetings of the ranks while some of them work
T = TypeVar("T")


def gather_objects(own: T, size: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in the order of the group's ranks, on each of its `size` ranks. A collective call."""
    if size == 1:
        return [own]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own, group=group)
    watch.note()
    return parts


def from_rank0(value: T, size: int) -> T:
    """Return rank 0's object on every rank of the world. A collective call."""
    values = [value]
    if size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def rank0_does(work: Callable[[], T], size: int, every: float = EVERY) -> T:
    """Run `work` on rank 0 and return its result on every rank, as `some_do` does. A collective call."""
    result = some_do(work if size == 1 or dist.get_rank() == 0 else None, size, every)[0]
    return cast(T, result)


def some_do(work: Callable[[], T] | None, size: int, every: float = EVERY) -> list[T | None]:
    """Run `work` on the ranks that have some, in a thread, and return all results on every rank. A collective call.

    The ranks meet every `every` seconds, so that no rank waits for longer in a collective call, however long the work
    takes. The first rank's error is raised on every rank.
    """
    if size == 1:
        with watch.elsewhere():  # ranks of another world may wait for this one
            return [work() if work is not None else None]
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            if work is not None:
                done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="some_do", daemon=True)
    if work is not None:
        thread.start()
    while True:
        thread.join(every) if work is not None else None
        if not any(gather_objects(thread.is_alive(), size)):
            break
    ended = gather_objects((done, [_told(each, dist.get_rank()) for each in failed]), size)
    for rank, (_, errors) in enumerate(ended):
        if errors:
            raise failed[0] if rank == dist.get_rank() else errors[0]
    return [result[0] if result else None for result, _ in ended]


def _told(error: Exception, rank: int) -> Exception:
    """Return an error as the other ranks raise it. A bug comes with its traceback, as text."""
    if isinstance(error, UserError):
        return error
    return RuntimeError(f"rank {rank} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")


# ---- which ranks are on one machine, by a folder that they see ----


def leaders_of(folder: Path, refusal: Callable[[OSError], str], size: int) -> list[int]:
    """Return, for each rank, the first rank of its machine. A collective call.

    If there can be no folder somewhere, all ranks raise what `refusal` makes of the error.
    """
    machines = gather_objects(_machine(folder, refusal), size)
    for each in machines:
        if isinstance(each, str):
            raise DataError(each)
    return [machines.index(each) for each in machines]


def _machine(folder: Path, refusal: Callable[[OSError], str]) -> tuple[str, int, int] | str:
    """Return what ranks share that can use one folder: the kernel that runs them, and the folder; or the refusal."""
    try:
        cache.make(folder)
        stat = folder.stat()
    except OSError as error:
        return refusal(error)
    return (BOOT.read_text() if BOOT.exists() else os.uname().nodename), stat.st_dev, stat.st_ino
