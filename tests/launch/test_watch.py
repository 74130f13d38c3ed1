"""A rank that computes for long is waited for; ranks that get no further end, and those that hold them up are named."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlexp.launch import local, rank_reports, watch
from rlexp.launch.joining import RankSpec, join, launch_on, leave_world
from rlexp.launch.local import PRELOAD, Interrupted, RankFailed, run_ranks
from rlexp.launch.watch import Standing, behind_of
from rlexp.training.rollout.experience import Host, build_host
from rlexp.training.world.groups import ALONE, World
from rlexp.training.world.objects import gather_objects
from tests.helpers.moved_clock import MovedClock

PATIENT = 10.0  # seconds of a clock that a rank moves


def on_watched_ranks(ranks: int, folder: Path, function: Callable[[int, MovedClock], Any]) -> list[Any]:
    clock = MovedClock.file(folder / "clock", ranks)
    return run_ranks(_joined, ranks, (function, clock), preload=PRELOAD, timeout=240.0)


def _joined(spec: RankSpec, function: Callable[[int, MovedClock], Any], path: Path) -> Any:
    clock = watch.clock = MovedClock(path, spec.rank)
    if function is comes_late and spec.rank == 2:
        clock.move(2 * PATIENT, [0, 1])
    join(spec, launch_on("cpu", PATIENT))
    answer = function(spec.rank, clock)
    leave_world()
    return answer


def slow_but_sure(rank: int, clock: MovedClock) -> list[int]:
    """Rank 1 takes twice as long as a rank waits for one that hangs; then it waits for what has no limit. In the end
    all stand still for longer, as in a job that Slurm suspends."""
    if rank == 1:
        for _ in range(3):
            clock.move(0.7 * PATIENT, range(3))
            watch.note()
    gather_objects(rank, 3)
    if rank == 1:
        with watch.elsewhere():
            clock.move(2 * PATIENT, range(3))
    gather_objects(rank, 3)
    if rank == 1:
        clock.jump(20 * PATIENT, range(3))
    return gather_objects(rank, 3)


def all_compute(rank: int, clock: MovedClock) -> list[int]:
    """Rank 0 computes until rank 1 says that the time has passed: it reads a file, which is no collective."""
    if rank == 1:
        clock.move(3 * PATIENT, range(2))
    while clock.now() < 3 * PATIENT:
        time.sleep(0.001)
    return gather_objects(rank, 2)


def hangs(rank: int, clock: MovedClock) -> None:
    """The others wait where they wait for samples, which may take long to draw."""
    host: Host = build_host(World(rank, 3, ALONE))
    if rank == 1:
        watch.at("in step 7, in its backward phase")
        clock.move(100 * PATIENT, range(3))
    host.meet()


def comes_late(_rank: int, _clock: MovedClock) -> None:
    """Rank 2 never joins."""


@pytest.fixture(autouse=True)
def launcher_that_waits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for reports that say no more than the first."""
    monkeypatch.setattr(rank_reports, "PATIENCE", 1.0)


def test_a_rank_that_gets_further_is_waited_for(tmp_path: Path) -> None:
    assert on_watched_ranks(3, tmp_path, slow_but_sure) == [[0, 1, 2]] * 3


def test_ranks_that_all_compute_are_left_alone(tmp_path: Path) -> None:
    """As long as none waits for another: they load a model, say, and note nothing."""
    assert on_watched_ranks(2, tmp_path, all_compute) == [[0, 1]] * 2


def test_who_holds_the_others_up_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as error:
        on_watched_ranks(3, tmp_path, hangs)
    assert (
        "Timed out waiting: no rank has got any further in launch.timeout_seconds=10. Behind the others: rank 1; "
        "rank 0 waits where it began; rank 1 is in step 7, in its backward phase; rank 2 waits"
    ) in str(error.value)


def test_who_never_joins_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"Behind the others: rank 2; .* rank 2 does not answer\."):
        on_watched_ranks(3, tmp_path, comes_late)


def test_why_a_stuck_rank_ends_is_reported_or_else_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a launcher that is not ours, too: `report_by` is given a function of the launcher's."""
    reported: list[BaseException] = []
    ends: list[int] = []
    monkeypatch.setattr(watch, "_report", watch._report)
    monkeypatch.setattr(watch.os, "_exit", ends.append)
    looking = watch.RankWatch(dist.HashStore(), 0, 2, PATIENT)
    for report in (lambda error: reported.append(error), lambda: None):
        watch.report_by(report)  # type: ignore[arg-type]
        looking._end([1], "Behind the others: rank 1")
    assert str(reported[0]).endswith("in launch.timeout_seconds=10. Behind the others: rank 1.")
    assert (len(reported), ends) == (1, [1, 1])
    assert "Behind the others: rank 1.\n" in (printed := capsys.readouterr().err)
    assert "TypeError" in printed


def test_a_long_wait_for_something_else_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    looking = watch.RankWatch(None, 1, 2, 10.0)  # type: ignore[arg-type]
    for seconds in (9, 9, 30):
        with watch.elsewhere("the disk"):
            for _ in range(seconds):
                looking._tell_a_long_wait(1.0)
        looking._tell_a_long_wait(1.0)
    said = capsys.readouterr().err
    assert said == "rlexp: rank 1 has waited for the disk for more than launch.timeout_seconds=10, and waits on.\n"


@pytest.mark.parametrize(("beats", "looks"), [([1.0] * 20, 12), ([1.0, 1.0, 1000.0, *[1.0] * 20], 11)])
def test_a_rank_is_quiet_from_its_last_progress_on(
    beats: list[float], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after more than ten seconds in which it was looked at; a pause of all ranks counts as two looks."""
    left, now = iter(beats), [0.0]

    def pause(_ended: threading.Event, _seconds: float) -> bool:
        now[0] += next(left)
        return False

    monkeypatch.setattr(watch, "clock", SimpleNamespace(now=lambda: now[0], pause=pause))
    monkeypatch.setattr(watch, "_progress", watch._Progress())
    assert watch.RankWatch(dist.HashStore(), 0, 2, PATIENT)._nobody_gets_further() is not None
    assert len(beats) - len([*left]) == looks


def test_ranks_have_their_grace_before_a_stop_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stop = local._Stop()
    stop.grace = 20.0
    stop.hear(signal.SIGTERM, None)
    for now[0] in (0.0, 10.0, 20.0):
        stop.pass_on([])
    now[0] = 20.1
    with pytest.raises(Interrupted):
        stop.pass_on([])


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds it, and is stopped: its connections stay open. Rank 1 waits in a collective."""
    never = threading.Event()
    monkeypatch.setattr(watch, "ANSWER", 0.01)
    monkeypatch.setattr(watch, "waits", lambda: True)
    monkeypatch.setattr(watch, "begun", lambda: 0)
    looking = watch.RankWatch(SimpleNamespace(check=lambda _: never.wait(), set=lambda *_: never.wait()), 1, 2, 0.1)
    assert looking._passed_on(further=False) == b""
    assert looking._verdict(b"") == (
        [], "Their store does not answer: rank 0, which holds it, may be gone or stopped",
    )  # fmt: skip
    never.set()


def test_a_rank_alone_keeps_no_events_that_nobody_looks_at() -> None:
    watch.begin(dist.HashStore(), 0, 1, PATIENT, gpu=0)
    for _ in range(3):
        watch.note()  # it would need a GPU to record one
    assert watch._progress.done() == watch._progress.noted


def test_the_watch_looks_at_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another GPU, looking would take the memory of a context."""
    at: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", at.append)
    looking = watch.RankWatch(dist.HashStore(), 1, 2, PATIENT, gpu=3)
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
        ({0: (True, 4, 6), 1: (True, 5, 5), 2: (True, 5, 5)}, [0]),  # it has begun more, and come less far
        ({0: (True, 5, 6), 1: (True, 4, 9), 2: (True, 5, 5)}, [1, 2]),
        ({0: (False, 6, 2), 1: (False, 5, 3), 2: (False, 6, 2)}, [1]),
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
