"""Exchange Python objects between ranks: few and small, such as names, counts and errors."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlexp.errors import UserError

T = TypeVar("T")


def gather_objects(mine: T, size: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in the order of the group's ranks, on each of its `size` ranks. A collective call."""
    if size == 1:
        return [mine]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, mine, group=group)
    return parts


def from_rank0(value: T, size: int) -> T:
    """Return rank 0's object on every rank of the world. A collective call."""
    values = [value]
    if size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def rank0_does(work: Callable[[], T], size: int, every: float) -> T:
    """Run `work` on rank 0, in a thread, and return its result on every rank. A collective call.

    Rank 0 tells the others every `every` seconds that it is still at work, so that no rank waits for longer, however
    long the work takes. Its error is raised on every rank.
    """
    if size == 1:
        return work()
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="rank0_does", daemon=True)
    if dist.get_rank() == 0:
        thread.start()
    at_work = True
    while at_work:
        if dist.get_rank() == 0:
            thread.join(every)
        at_work = from_rank0(thread.is_alive(), size)
    result, error = from_rank0((done, [_told(each) for each in failed]), size)
    if error:
        raise (failed or error)[0]
    return result[0]


def _told(error: Exception) -> Exception:
    """Return an error as the other ranks raise it. A bug comes with its traceback, as text."""
    if isinstance(error, UserError):
        return error
    return RuntimeError(f"rank 0 failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
