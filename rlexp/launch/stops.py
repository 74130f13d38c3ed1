"""How a run is asked to stop, from the launcher's terminal to the rank that finishes its step.

Outside of training a stop ends the process where it is: there is nothing to lose. While training, it is a request: the
step is finished, the state saved. It is no longer a request when it has been open for longer than its grace, or when
Ctrl-C comes a second time. Of a job whose time is limited, the clock asks too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlexp.config.cadence import BEFORE_END

# What asks a run to stop.
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# How a launcher passes that on to its ranks: a terminal or Slurm may signal them too, and that is not a second request.
PASSED_ON = {asked: signal.SIGRTMIN + 1 + number for number, asked in enumerate(ASKING)}
END_NOW, PEER_FAILED = signal.SIGRTMIN + 8, signal.SIGRTMIN + 9
_ALL = {*ASKING, *PASSED_ON.values(), END_NOW, PEER_FAILED}
LAST = 4.0  # seconds after the grace, for a rank that waits where Python does not hear
END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970, of Slurm's or of the batch script
TIME_IS_UP = signal.SIGXCPU


@dataclass(frozen=True)
class Outcome:
    """How a rank ended in good order."""

    status: str = "finished"  # or "stopped"
    reason: str = "all steps are done"
    exit_code: int = 0


class Terminated(BaseException):
    """A rank is asked to end at once. Not an Exception: nothing but the outermost `finally` may catch it.

    `exit_code` is 128 + the signal that stopped the run, and 1 where another rank failed.
    """

    def __init__(self, signum: int) -> None:
        self.exit_code = 1 if signum == PEER_FAILED else 128 + signum
        super().__init__("another rank failed" if signum == PEER_FAILED else stopped_by(signum))


def stopped_by(signum: int) -> str:
    return "stopped as its time was nearly up" if signum == TIME_IS_UP else f"stopped by {name_of(signum)}"


def name_of(signum: int) -> str:
    """Python has no names for real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class _Stops:
    """The process's, as signals are."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.ended: Terminated | None = None
        self.grace: float | None = None  # seconds, while a request may be finished in good order
        self.watchdog: threading.Timer | None = None

    def end(self, signum: int) -> None:
        self.ended = self.ended or Terminated(signum)
        raise self.ended

    def ask(self, signum: signal.Signals) -> None:
        """The first request while training is remembered, every other one ends the process."""
        first, self.asked = self.asked is None, self.asked or signum
        if self.grace is None:
            self.end(signum)
        elif first:
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            # In a collective that nobody else joins, no handler runs.
            self.watchdog = threading.Timer(self.grace + LAST, os._exit, (128 + signum,))
            self.watchdog.daemon = True
            self.watchdog.start()
        elif signum is signal.SIGINT:
            self.end(signum)


_stops = _Stops()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes started meanwhile hear nothing until `hear_stops`: one that is signalled as it is born would die of
    it, and a fork server, which a signal to the whole process group reaches too, take all ranks along."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_stops(*, under_launcher: bool) -> None:
    """Install the handlers. A rank that a launcher of ours started leaves Ctrl-C to it."""
    for asked in ASKING:
        signal.signal(asked, lambda signum, _frame: _stops.ask(signal.Signals(signum)))
    if under_launcher:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        meant = {passed_on: asked for asked, passed_on in PASSED_ON.items()}
        for passed_on in meant:
            signal.signal(passed_on, lambda signum, _frame: _stops.ask(meant[signum]))
        signal.signal(END_NOW, lambda _signum, _frame: _stops.end(_stops.asked or signal.SIGINT))
        signal.signal(PEER_FAILED, lambda signum, _frame: _stops.end(signum))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    signal.signal(signal.SIGALRM, lambda _signum, _frame: _stops.end(_stops.asked or signal.SIGALRM))


def deaf() -> None:
    """This rank is ending by itself, and will say why."""
    for signum in (*ASKING, *PASSED_ON.values(), END_NOW, PEER_FAILED, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)


def asked() -> signal.Signals | None:
    """The request that is open."""
    if _stops.asked is None and _stops.grace is not None and time_is_up(_stops.grace):
        _stops.ask(TIME_IS_UP)
    return _stops.asked


def time_is_up(grace: float) -> bool:
    """Whether a step that is begun now might be cut off before its state is saved."""
    end = os.environ.get(END_TIME, "")
    return end.isdecimal() and time.time() > int(end) - grace - BEFORE_END


def heard(error: BaseException) -> BaseException:
    """What ended this rank: the signal it was ended by, rather than the peer that was ended first and left, or what
    failed of being broken off (a `finally` of OmegaConf's does)."""
    return _stops.ended or error


@contextlib.contextmanager
def finishing_steps(grace: float) -> Iterator[None]:
    """While this lasts, a stop is a request."""
    _stops.grace = grace
    try:
        yield
    finally:
        _stops.grace = None
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if _stops.watchdog is not None:
            _stops.watchdog.cancel()


def end_with_parent() -> None:
    """Under torchrun, which dies of a signal that it does not handle and leaves its ranks behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))
