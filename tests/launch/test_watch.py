"""A rank that computes for long is waited for; ranks that get no further end, and those that hold them up are named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlexp.launch import watch
from rlexp.launch.joining import RankSpec, join, launch_on, leave_world
from rlexp.launch.local import PRELOAD, RankFailed, run_ranks
from rlexp.launch.watch import Standing, behind_of
from rlexp.training.rollout.host import Host, build_host
from rlexp.training.world.groups import ALONE, World
from rlexp.training.world.objects import gather_objects

PATIENT = 1.0  # seconds


def on_watched_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    return run_ranks(_joined, ranks, (function,), preload=PRELOAD, timeout=60.0)


def _joined(spec: RankSpec, function: Callable[[int], Any]) -> Any:
    join(spec, launch_on("cpu", PATIENT))
    found = function(spec.rank)
    leave_world()
    return found


def slow_but_sure(rank: int) -> list[int]:
    """Rank 1 takes four times as long as a rank waits for one that hangs."""
    if rank == 1:
        for _ in range(16):
            time.sleep(PATIENT / 4)
            watch.note()
    return gather_objects(rank, 3)


def elsewhere(rank: int) -> list[int]:
    if rank == 1:
        with watch.elsewhere():
            time.sleep(3 * PATIENT)
    return gather_objects(rank, 3)


def suspended(rank: int) -> list[int]:
    """All ranks stand still for longer than a rank waits, as in a job that Slurm suspends, and then go on."""
    time.sleep(PATIENT / 2)
    subprocess.Popen(["sh", "-c", f"sleep {3 * PATIENT}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(PATIENT / 2)
    return gather_objects(rank, 3)


def hangs(rank: int) -> None:
    if rank == 1:
        watch.at("in step 7, in its backward phase")
        time.sleep(1000)
    gather_objects(rank, 3)


def hangs_while_the_others_have_drawn(rank: int) -> None:
    host: Host = build_host(World(rank, 3, ALONE))
    if rank == 1:
        watch.at("in step 7, in its backward phase")
        time.sleep(1000)
    host.meet()


@pytest.mark.parametrize("function", [slow_but_sure, elsewhere, suspended])
def test_a_rank_that_gets_further_is_waited_for(function: Callable[[int], Any]) -> None:
    assert on_watched_ranks(3, function) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("function", [hangs, hangs_while_the_others_have_drawn])
def test_who_holds_the_others_up_is_named(function: Callable[[int], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as error:
        on_watched_ranks(3, function)
    said = str(error.value)
    assert (
        "Timed out waiting: no rank has got any further in launch.timeout_seconds=1. Behind the others: rank 1; "
        in said
    )
    assert "rank 0 waits where it began; rank 1 is in step 7, in its backward phase; rank 2 waits" in said
    assert time.monotonic() - began < 45


def _never_joins(spec: RankSpec) -> None:
    if spec.rank == 1:
        time.sleep(1000)
    join(spec, launch_on("cpu", PATIENT))


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankFailed, match=r"Behind the others: rank 1; rank 0 waits .*; rank 1 does not answer"):
        run_ranks(_never_joins, 3, preload=PRELOAD, timeout=60.0)


def test_the_watch_looks_at_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another GPU, looking would take the memory of a context."""
    at: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", at.append)
    looking = watch.Watch(dist.HashStore(), 1, 2, PATIENT, gpu=3)
    looking.ended.set()
    looking.run()
    assert at == [3]


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
