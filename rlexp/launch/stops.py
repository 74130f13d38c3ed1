"""How a run is asked to stop, from the launcher's terminal to the rank that finishes its step.

Outside of training a stop ends the process at once, since nothing would be lost. During training a stop is a request:
the step is finished and the state saved. The process ends at once when the request is older than its grace, or at a
second Ctrl-C. In a job with a time limit the clock asks for a stop too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from rlexp.config.schema.cadence import BEFORE_END

# Signals that ask a run to stop.
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals by which a launcher passes a request on to its ranks. A terminal or Slurm may also signal the ranks
# themselves, and that must not count as a second request.
PASSED_ON = {asked: signal.SIGRTMIN + 1 + number for number, asked in enumerate(ASKING)}
END_NOW, PEER_FAILED = signal.SIGRTMIN + 8, signal.SIGRTMIN + 9
_ALL = {*ASKING, *PASSED_ON.values(), END_NOW, PEER_FAILED}
AGAIN = 0.002  # seconds until a stop that was lost is raised again
LAST = 4.0  # seconds after the grace, for a rank in a call that Python cannot interrupt
END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970, set by Slurm or by the batch script
TIME_IS_UP = signal.SIGXCPU
ENDS_WITH_PARENT = "RLEXP_ENDS_WITH_PARENT"  # a variable by which a program asks the command that it starts


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, when nothing failed."""

    status: str = "finished"  # or "stopped"
    reason: str = "all steps are done"
    exit_code: int = 0


class Terminated(BaseException):
    """A rank must end at once. Not an Exception: only the outermost handler may catch it.

    `exit_code` is 128 + the signal that stopped the run, and 1 where another rank failed.
    """

    def __init__(self, signum: int) -> None:
        self.exit_code = 1 if signum == PEER_FAILED else 128 + signum
        super().__init__("another rank failed" if signum == PEER_FAILED else stopped_by(signum))


def stopped_by(signum: int) -> str:
    return "stopped as its time was nearly up" if signum == TIME_IS_UP else f"stopped by {name_of(signum)}"


def name_of(signum: int) -> str:
    """Return a signal's name, also for real-time signals, which Python does not name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def say_at_once(text: str) -> None:
    """Write below a progress bar, in one call and without a lock, since a signal's handler may call it. Nothing is
    written to a pipe that nobody empties."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{chr(10) * os.isatty(2)}rlexp: {text}\n".encode())


class _Stops:
    """This process's requests to stop. There is one instance, since signals are per process."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.ended: Terminated | None = None
        self.grace: float | None = None  # seconds; set while a request lets the step finish
        self.watchdog: threading.Timer | None = None
        self.answer: Callable[[signal.Signals], None] | None = None  # says what a request leads to

    def end(self, signum: int, frame: FrameType | None) -> None:
        """Raise what ends this process, where it is at work, unless it would be lost there."""
        self.ended = self.ended or Terminated(signum)
        if _tells_of_a_loss(frame):
            _raise_again()
        else:
            raise self.ended

    def ask(self, signum: signal.Signals, frame: FrameType | None = None) -> None:
        """Remember the first request during training. A second SIGINT, or any request outside training, ends it."""
        first, self.asked = self.asked is None, self.asked or signum
        if self.grace is None:
            self.end(signum, frame)
        elif first:
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            # No handler runs while the rank waits in a collective that nobody else joins.
            self.watchdog = threading.Timer(self.grace + LAST, os._exit, (128 + signum,))
            self.watchdog.daemon = True
            self.watchdog.start()
            if self.answer is not None:
                self.answer(signum)
        elif signum is signal.SIGINT:
            self.end(signum, frame)


_stops = _Stops()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block the signals for processes that are started meanwhile, until they call `hear_stops`. Without it a signal
    would kill a process that has just been forked, or the fork server and with it all ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_stops(*, under_launcher: bool) -> None:
    """Install the handlers. A rank that rlexp's own launcher started leaves Ctrl-C to the launcher."""
    for asked in ASKING:
        signal.signal(asked, lambda signum, frame: _stops.ask(signal.Signals(signum), frame))
    if under_launcher:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        meant = {passed_on: asked for asked, passed_on in PASSED_ON.items()}
        for passed_on in meant:
            signal.signal(passed_on, lambda signum, frame: _stops.ask(meant[signum], frame))
        signal.signal(END_NOW, lambda _signum, frame: _stops.end(_stops.asked or signal.SIGINT, frame))
        signal.signal(PEER_FAILED, lambda signum, frame: _stops.end(signum, frame))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    signal.signal(signal.SIGALRM, lambda _signum, frame: _stops.end(_stops.asked or signal.SIGALRM, frame))
    sys.unraisablehook = _lost


def answer_by(answer: Callable[[signal.Signals], None]) -> None:
    """Let this rank say what the first request leads to. Under rlexp's own launcher, the launcher says it."""
    _stops.answer = answer


def _lost(lost: sys.UnraisableHookArgs) -> None:
    """Raise a stop again that came while an object was being freed, where Python drops what is raised."""
    if isinstance(lost.exc_value, Terminated):
        _raise_again()
    else:
        sys.__unraisablehook__(lost)


def _tells_of_a_loss(frame: FrameType | None) -> bool:
    """Whether a signal came inside `_lost`, where Python would drop what is raised once more, and print it."""
    while frame is not None and frame.f_code is not _lost.__code__:
        frame = frame.f_back
    return frame is not None


def _raise_again() -> None:
    signal.setitimer(signal.ITIMER_REAL, AGAIN)


def ignore_stops() -> None:
    """Ignore all stops: this rank is ending by itself and is about to report why."""
    if threading.current_thread() is not threading.main_thread():  # of the watch, which then ends the process
        return
    for signum in (*ASKING, *PASSED_ON.values(), END_NOW, PEER_FAILED, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)


def asked() -> signal.Signals | None:
    """Return the open request, if any."""
    end, grace = os.environ.get(END_TIME, ""), _stops.grace
    # The job's time limit might interrupt a step begun now before its state is saved.
    if _stops.asked is None and grace is not None and end.isdecimal() and time.time() > int(end) - grace - BEFORE_END:
        _stops.ask(TIME_IS_UP)
    return _stops.asked


def cause_of(error: BaseException) -> BaseException:
    """Return what really ended this rank. A signal comes before `error`, which may only follow from it: a peer that
    left first, or a `finally` block that failed when it was interrupted (OmegaConf has one)."""
    return _stops.ended or error


@contextlib.contextmanager
def finishing_steps(grace: float) -> Iterator[None]:
    """Inside this block a stop is a request, and the step may finish within `grace` seconds."""
    _stops.grace = grace
    try:
        yield
    finally:
        _stops.grace = None
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if _stops.watchdog is not None:
            _stops.watchdog.cancel()


def end_with_parent() -> None:
    """End this rank with its parent: torchrun dies of signals that it does not handle, without ending its ranks."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))
