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
    if function is comes_late and spec.rank == 2:
        time.sleep(1000)
    join(spec, launch_on("cpu", PATIENT))
    found = function(spec.rank)
    leave_world()
    return found


def slow_but_sure(rank: int) -> list[int]:
    """Rank 1 takes twice as long as a rank waits for one that hangs; then it waits for what has no limit. In the end
    all stand still for longer, as in a job that Slurm suspends."""
    if rank == 1:
        for _ in range(4):
            time.sleep(PATIENT / 2)
            watch.note()
    gather_objects(rank, 3)
    if rank == 1:
        with watch.elsewhere():
            time.sleep(2 * PATIENT)
    gather_objects(rank, 3)
    time.sleep(PATIENT / 4)
    subprocess.Popen(["sh", "-c", f"sleep {2 * PATIENT}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    return gather_objects(rank, 3)


def all_compute(rank: int) -> list[int]:
    time.sleep(3 * PATIENT)
    return gather_objects(rank, 2)


def hangs(rank: int) -> None:
    """The others wait where they wait for samples, which may take long to draw."""
    host: Host = build_host(World(rank, 3, ALONE))
    if rank == 1:
        watch.at("in step 7, in its backward phase")
        time.sleep(1000)
    host.meet()


def comes_late(_rank: int) -> None:
    """Rank 2 never joins."""


def test_a_rank_that_gets_further_is_waited_for() -> None:
    assert on_watched_ranks(3, slow_but_sure) == [[0, 1, 2]] * 3


def test_ranks_that_all_compute_are_left_alone() -> None:
    """As long as none waits for another: they load a model, say, and note nothing."""
    assert on_watched_ranks(2, all_compute) == [[0, 1]] * 2


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


def test_who_never_joins_is_named() -> None:
    with pytest.raises(RankFailed, match=r"Behind the others: rank 2; .* rank 2 does not answer\."):
        on_watched_ranks(3, comes_late)


def test_a_rank_alone_keeps_no_events_that_nobody_looks_at() -> None:
    watch.begin(dist.HashStore(), 0, 1, PATIENT, gpu=0)
    for _ in range(3):
        watch.note()  # it would need a GPU to record one
    assert watch._progress.done() == watch._progress.noted


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
