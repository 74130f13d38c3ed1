"""A rank that computes for long is waited for; ranks that get no further end, and those that hold them up are named."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rlexp.launch import watch
from rlexp.launch.joining import RankSpec, join, launch_on, leave_world
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks
from rlexp.launch.watch import Standing, behind_of
from rlexp.training.world.objects import gather_objects

PATIENT = 1.0  # seconds


def on_watched_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    return run_ranks(_joined, ranks, (function,), preload=PRELOAD, timeout=60.0)


def _joined(spec: RankSpec, function: Callable[[int], Any]) -> Any:
    join(spec, launch_on("cpu", PATIENT))
    found = function(spec.rank)
    leave_world()
    return found


def computes_for_long() -> None:
    """Take four times as long as a rank waits for one that hangs."""
    for _ in range(16):
        time.sleep(PATIENT / 4)
        watch.note()


def slow_but_sure(rank: int) -> list[int]:
    if rank == 1:
        computes_for_long()
    return gather_objects(rank, 3)


def elsewhere(rank: int) -> list[int]:
    if rank == 1:
        with watch.elsewhere():
            time.sleep(3 * PATIENT)
    return gather_objects(rank, 3)


def hangs(rank: int) -> None:
    if rank == 1:
        watch.at("in step 7, in its backward phase")
        time.sleep(1000)
    gather_objects(rank, 3)


@pytest.mark.parametrize("function", [slow_but_sure, elsewhere])
def test_a_rank_that_gets_further_is_waited_for(function: Callable[[int], Any]) -> None:
    assert on_watched_ranks(3, function) == [[0, 1, 2]] * 3


def test_who_holds_the_others_up_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as error:
        on_watched_ranks(3, hangs)
    said = str(error.value)
    assert (
        "Timed out waiting: no rank has got any further in launch.timeout_seconds=1. Behind the others: rank 1; "
        in said
    )
    assert "rank 0 waits where it began; rank 1 is in step 7, in its backward phase; rank 2 waits" in said
    assert time.monotonic() - began < 45


def never_joins(spec: RankSpec) -> None:
    if spec.rank == 1:
        time.sleep(60.0)
    join(spec, launch_on("cpu", PATIENT))


def test_a_rank_that_never_joins_is_named() -> None:
    """The others wait in the constructor of their process group, whose collectives have no limit."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"no rank has got any further .* Behind the others: rank 1"):
        run_ranks(never_joins, 2, preload=PRELOAD, timeout=50.0)
    assert time.monotonic() - began < 45


def asks_the_store(spec: RankSpec, port: int) -> bytes:
    """Wait for a key as NCCL waits for a communicator that another rank is about to make."""
    join(dataclasses.replace(spec, init_method=f"tcp://127.0.0.1:{port}"), launch_on("cpu", PATIENT))
    _, store = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
    if spec.rank == 1:
        computes_for_long()
        store.set("a communicator", "made")
    found: bytes = store.get("a communicator")
    leave_world()
    return found


def test_a_rank_that_computes_for_long_may_be_late_for_a_communicator() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(asks_the_store, 2, (port,), preload=PRELOAD, timeout=60.0) == [b"made"] * 2


@pytest.mark.parametrize(
    ("standings", "behind"),
    [
        ({0: (True, 5, 5), 1: (False, 9, 5), 2: (True, 5, 5)}, [1]),  # it waits for nobody
        ({0: (True, 5, 5), 2: (True, 5, 5)}, [1]),  # it does not answer
        ({0: (False, 5, 5), 1: (False, 4, 5), 2: (False, 5, 5)}, [1]),  # a GPU's host cannot tell who waits
        ({0: (True, 5, 6), 1: (True, 5, 5), 2: (True, 5, 6)}, [1]),  # it has left a collective out
        ({0: (True, 5, 5), 1: (True, 5, 5), 2: (True, 5, 5)}, []),
    ],
)
def test_ranks_that_are_behind(standings: dict[int, tuple[bool, int, int]], behind: list[int]) -> None:
    assert behind_of({rank: Standing(*each, "") for rank, each in standings.items()}, 3) == behind


def test_what_a_gpu_was_given_to_do_counts_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host runs minutes ahead of its device. The events are stubs here."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    events: list[Event] = []
    progress = watch._Progress()
    progress.event = lambda: events.append(Event()) or events[-1]  # type: ignore[func-returns-value]
    monkeypatch.setattr(watch, "BETWEEN_EVENTS", 0.0)
    for _ in range(3):
        progress.note()
    assert progress.done() == 0
    events[0].done = events[1].done = True
    assert progress.done() == 2
    events[2].done = True
    assert progress.done() == 3
