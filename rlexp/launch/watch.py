"""Do the ranks still get anywhere? A rank may compute for long while others wait for it; a rank that hangs may not.

No collective has a time limit of its own: replicas have different work, and a GPU may be minutes behind its host. Each
rank notes how far it is, as often as a layer attends, and a thread of each passes that on to all. When no rank has got
any further for `launch.timeout_seconds`, each says where it is. If some wait, all but those that are behind end with an
error that names these; if none waits, all compute, and are left alone.

Who waits for another rank of the world notes nothing, or two ranks could wait for each other for ever. Who waits for
anything else, such as a disk, the hub or a reward, says so by `elsewhere`, or notes each piece of it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # at run time it would import torch, which the launcher does not need
    import torch.distributed as dist

T = TypeVar("T")
FOR_EVER = timedelta(days=7)  # of a collective; who ends it is the watch
MOST_BEAT = 15.0  # seconds between two looks
ANSWER = 5.0  # seconds for the store to answer, at least; rank 0, which holds it, may have stopped
BETWEEN_EVENTS = 0.01  # seconds of the host between two events of a GPU: it launches whole layers in less
WAITING = ("rlexp/launch/staged.py", "rlexp/training/ring/collectives.py")  # beside torch's own files
GOT_FURTHER, PLACE = "watch/further", "watch/place"  # keys in the store


class Stuck(Exception):
    """No rank of the world gets any further."""


class Clock:
    """The time by which a watch looks."""

    def now(self) -> float:
        return time.monotonic()

    def pause(self, ended: threading.Event, seconds: float) -> bool:
        """Wait for so long, or until the watch ends. Return whether it has ended."""
        return ended.wait(seconds)


clock = Clock()  # a test has one of its own, and moves it


class _Progress:
    """How far this rank has come. What a GPU was given to do counts when it is done."""

    def __init__(self) -> None:
        self.noted = self._done = 0
        self.place = ""  # in words
        self.waits_elsewhere = 0  # calls that wait for what is no rank of this world, or has a limit of its own
        self.waits_begun, self.waits_for = 0, ""  # how many there were, and for what the last one waits
        self.event: Callable[[], Any] | None = None  # records one on the stream that computes
        self._events: deque[tuple[int, Any]] = deque()
        self._next_event = 0.0

    def note(self) -> None:
        self.noted += 1
        if self.event is not None and time.monotonic() >= self._next_event:
            self._events.append((self.noted, self.event()))
            self._next_event = time.monotonic() + BETWEEN_EVENTS

    def done(self) -> int:
        while self._events and self._events[0][1].query():
            self._done, _ = self._events.popleft()
        return self._done if self._events else self.noted


_progress = _Progress()
_watch: RankWatch | None = None


def note() -> None:
    """Say that this rank has got further. It may be called for each layer of each pass."""
    _progress.note()


def at(place: str) -> None:
    """Say where this rank is, as `in step 3, in its forward phase`."""
    _progress.place = place
    _progress.note()


@contextlib.contextmanager
def elsewhere(what: str = "a disk, the hub or a reward") -> Iterator[None]:
    """Wait within it for what may take as long as it likes, and is no rank of this world: a disk, the hub, a reward.
    A wait longer than `launch.timeout_seconds` is told."""
    _progress.waits_elsewhere += 1
    _progress.waits_begun, _progress.waits_for = _progress.waits_begun + 1, what
    try:
        yield
    finally:
        _progress.waits_elsewhere -= 1


def begin(store: dist.Store, rank: int, ranks: int, seconds: float, gpu: int | None) -> None:
    """Watch the ranks that meet at this store, until `end`."""
    global _watch
    end()
    if ranks > 1:
        _progress.event = None if gpu is None else _recorded
        _watch = RankWatch(store, rank, ranks, seconds, gpu)
        _watch.start()


def _recorded() -> Any:
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


@atexit.register
def end() -> None:
    global _watch
    watch, _watch = _watch, None
    _progress.event = None  # nobody would take the events away
    if watch is not None:
        watch.ended.set()
        watch.join(timeout=5.0)


def _print(error: BaseException) -> None:
    sys.stderr.write(f"{error}\n")


_report: Callable[[BaseException], None] = _print


def report_by(report: Callable[[BaseException], None]) -> None:
    """Pass the error that ends this process to `report`, in the thread of the watch."""
    global _report
    _report = report


class RankWatch(threading.Thread):
    """Looks after all ranks from one of them."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, seconds: float, gpu: int | None = None) -> None:
        super().__init__(name="watch", daemon=True)
        self._store, self._rank, self._ranks, self._seconds, self._gpu = store, rank, ranks, seconds, gpu
        self._beat = min(MOST_BEAT, seconds / 10)
        self._wait, self._waited = 0, 0.0  # the number of a wait for something else, and its seconds
        self._question: threading.Thread | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        if self._gpu is not None:
            import torch

            torch.cuda.set_device(self._gpu)  # a thread begins on the first GPU, and asking it would take memory there
        while (since := self._nobody_gets_further()) is not None:
            verdict = self._verdict(since)
            if verdict is not None:
                self._end(*verdict)

    def _nobody_gets_further(self) -> bytes | None:
        """Wait until it is so, and return what has not changed since; None if the watch ends before.

        Between two looks no more than two beats count: a job that Slurm suspends for an hour goes on where it was.
        """
        last_done, seen, quiet, looked = -1, b"", 0.0, clock.now()
        while not clock.pause(self.ended, self._beat):
            done = _progress.done()
            further, last_done = done != last_done or _progress.waits_elsewhere > 0, done
            now = self._passed_on(further=further)
            before, looked = looked, clock.now()
            passed = min(looked - before, 2 * self._beat)
            self._tell_a_long_wait(passed)
            quiet = 0.0 if further or now != seen else quiet + passed
            seen = now
            if quiet > self._seconds:
                return seen
        return None

    def _tell_a_long_wait(self, passed: float) -> None:
        """Say once of a wait for what is no rank that it is long: nobody ends it."""
        same = _progress.waits_elsewhere > 0 and _progress.waits_begun == self._wait
        before, self._waited = self._waited, self._waited + passed if same else 0.0
        self._wait = _progress.waits_begun
        if before <= self._seconds < self._waited:
            sys.stderr.write(
                f"rlexp: rank {self._rank} has waited for {_progress.waits_for} for more than "
                f"launch.timeout_seconds={self._seconds:g}, and waits on.\n"
            )

    def _passed_on(self, *, further: bool) -> bytes:
        """Tell all ranks that this one has got further, and return what changes as soon as any has."""

        def passed_on() -> bytes:
            if further:
                self._store.add(GOT_FURTHER, 1)
            return self._store.get(GOT_FURTHER) if self._store.check([GOT_FURTHER]) else b""

        try:
            return self._answer(passed_on)
        except Exception:  # the store has gone with rank 0, or with its folder: then this rank's own progress counts
            return b""

    def _answer(self, question: Callable[[], T]) -> T:
        """Ask the store, in a thread that may wait for ever: a process that is stopped keeps its connections open."""
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        if self._question is not None and self._question.is_alive():
            raise TimeoutError("the store does not answer")
        self._question = threading.Thread(target=ask, name="watch's question", daemon=True)
        self._question.start()
        return answer.result(max(ANSWER, self._beat))

    def _verdict(self, since: bytes) -> tuple[list[int], str] | None:
        """Return the ranks that are behind, and where all are, in words. None if no rank waits, and so all compute, or
        if one has got further meanwhile."""
        standing = Standing(waits() or self._gpu_waits(), _progress.noted, begun(), _progress.place)
        try:
            known = self._standings(standing, since.decode())
            further = self._answer(lambda: self._store.get(GOT_FURTHER)) != since
        except Exception:
            why = "Their store does not answer: rank 0, which holds it, may be gone or stopped"
            return ([], why) if standing.waits else None
        if further or (len(known) == self._ranks and not any(each.waits for each in known.values())):
            return None
        behind = behind_of(known, self._ranks)
        lines = [f"rank {rank} {known[rank].in_words() if rank in known else 'does not answer'}"
                for rank in range(self._ranks)]  # fmt: skip
        return behind, "; ".join([f"Behind the others: {listed(behind)}"] * bool(behind) + lines)

    def _standings(self, standing: Standing, since: str) -> dict[int, Standing]:
        keys = [f"{PLACE}/{since}/{rank}" for rank in range(self._ranks)]
        self._answer(lambda: self._store.set(keys[self._rank], json.dumps(standing)))
        clock.pause(self.ended, 2 * self._beat)  # until each has looked

        def written() -> dict[int, bytes]:
            return {rank: self._store.get(key) for rank, key in enumerate(keys) if self._store.check([key])}

        return {rank: Standing(*json.loads(text)) for rank, text in self._answer(written).items()}

    def _gpu_waits(self) -> bool:
        """Say whether the GPU works on something that does not end: the host may wait for it, and no call tells."""
        if self._gpu is None:
            return False
        import torch

        event = torch.cuda.default_stream(self._gpu).record_event()
        clock.pause(self.ended, self._beat)
        return not event.query()

    def _end(self, behind: list[int], message: str) -> None:
        """End this process. Those that are behind wait, so that others are taken for those that waited."""
        if self._rank in behind and len(behind) < self._ranks:
            clock.pause(self.ended, 30.0)
        error = Stuck(
            f"Timed out waiting: no rank has got any further in launch.timeout_seconds={self._seconds:g}. {message}."
        )
        try:
            _report(error)
        except BaseException:  # it must not hide why this process ends
            _print(error)
            traceback.print_exc()
        finally:
            os._exit(1)


class Standing(NamedTuple):
    """Where a rank is when nobody gets any further."""

    waits: bool  # in a collective, as far as its host can tell
    noted: int
    begun: int
    place: str

    def in_words(self) -> str:
        return f"{'waits' if self.waits else 'is'} {self.place or 'where it began'}"


def behind_of(known: Mapping[int, Standing], ranks: int) -> list[int]:
    """Return the ranks for which the others wait: those that do not answer, those that wait for nobody, or those that
    have come less far. None if all are alike."""
    silent = [rank for rank in range(ranks) if rank not in known]
    active = [rank for rank, each in known.items() if not each.waits]
    if silent or 0 < len(active) < len(known):
        return silent or active
    far = {rank: (each.noted, each.begun) for rank, each in known.items()}
    return [rank for rank in far if far[rank] < max(far.values())]


def waits() -> bool:
    """Say whether a thread of this process waits in a collective, or for a message."""
    places = [frame.f_code.co_filename for thread, frame in sys._current_frames().items()
              if thread != threading.get_ident()]  # fmt: skip
    return any(each.endswith(end) or "/torch/distributed/" in each for each in places for end in WAITING)


def begun() -> int:
    """Count the collectives of all ranks that this rank has begun."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():  # it only samples
        return 0
    world: Any = dist.group.WORLD
    count = 0
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # there is none of this kind
            count += world._get_backend(torch.device(kind))._get_sequence_number_for_group()
    return count


def listed(ranks: Sequence[int]) -> str:
    """Name ranks: `ranks 0, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
