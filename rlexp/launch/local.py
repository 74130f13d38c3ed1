"""Ranks on this machine: started together, watched, and ended together.

On CPU the ranks are forked from one server process that has imported torch once, so eight ranks on a laptop do not
import it eight times. If one rank dies, all ranks end within `GRACE + KILL_AFTER` seconds, and its error is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlexp.base.errors import UserError
from rlexp.config import sizes
from rlexp.config.explain import explain
from rlexp.launch import rank_progress, rank_reports, watch
from rlexp.launch.joining import RankSpec
from rlexp.launch.rank_reports import RankReport
from rlexp.launch.slurm import meeting
from rlexp.launch.stops import (
    ASKING,
    END_NOW,
    PASSED_ON,
    PEER_FAILED,
    Terminated,
    cause_of,
    hear_stops,
    held_back,
    ignore_stops,
    name_of,
    say_at_once,
)

GRACE = 2.0  # seconds for the other ranks to report their errors, once one has failed
KILL_AFTER = 4.0  # seconds between SIGTERM and SIGKILL
PRELOAD = ("torch", "torch.distributed", "transformers.models.llama.modeling_llama", "rlexp.training.train.rank")


class RankFailed(UserError):
    """A rank hit a bug or was killed. The message carries the rank's own traceback."""

    def __init__(self, text: str, rank: int, *, killed: bool = False) -> None:
        super().__init__(text)
        self.rank, self.killed = rank, killed


class Interrupted(Exception):
    """A signal asked the launcher to stop, and all ranks have ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {name_of(signum)}")
        self.signum = signal.Signals(signum)
        self.exit_code = 128 + signum


@dataclass
class _Rank:
    process: Any  # multiprocessing.Process of the forkserver context
    inbox: Connection
    done: bool = False
    value: Any = None
    report: RankReport | None = None


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    device: str = "cpu",
    log_dir: Path | None = None,
    preload: Sequence[str] = PRELOAD,
    timeout: float | None = None,
    grace: float = 0.0,
    when_stopped: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run `target(place, *args)` on every rank and return what each returned.

    Rank 0 keeps this process's terminal; the others write to `log_dir/rank<r>.log` (or nowhere). A signal that asks
    for a stop is passed on, and the ranks have `grace` seconds to return. Without a grace, or at a second Ctrl-C, they
    end at once. `when_stopped` is called once, before the stop is answered.
    """
    context = _context(device, preload)
    with tempfile.TemporaryDirectory(prefix="rlexp-") as meeting, signals_raise() as stop:
        stop.run_dir, stop.when_stopped = log_dir.parent if log_dir else None, when_stopped
        ranks: list[_Rank] = []
        leash, held = context.Pipe(duplex=False)
        reason = PEER_FAILED
        try:
            for rank in range(world_size):
                spec = RankSpec(rank, world_size, rank, f"file://{meeting}/store")
                inbox, outbox = context.Pipe(duplex=False)
                log = str(log_dir / f"rank{rank}.log") if log_dir and rank else (os.devnull if rank else None)
                process = context.Process(
                    target=_rank_main, args=(target, spec, outbox, leash, log, pickle.dumps(tuple(args)))
                )
                with held_back():
                    process.start()
                outbox.close()
                ranks.append(_Rank(process, inbox))
            reports = _watch(ranks, timeout, stop, grace)
        except Interrupted as interrupted:
            reason = END_NOW if stop.passed_on else PASSED_ON[interrupted.signum]
            raise
        finally:
            _end(ranks, reason)
            held.close()
            leash.close()
    if reports:
        raise _failure(reports, world_size, log_dir)
    return [rank.value for rank in ranks]


def _context(device: str, preload: Sequence[str]) -> Any:
    """Return the way to start processes: on CPU a fork server that has imported `preload`; on GPU fresh processes,
    since CUDA does not survive a fork, and a library may touch the driver when it is imported."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # before signals are held back, since starting it unblocks them
    with held_back():
        forkserver.ensure_running()
    return context


def _watch(ranks: list[_Rank], timeout: float | None, stop: _Stop, grace: float) -> list[RankReport]:
    """Wait until all ranks have returned, or one has failed and the others have had `GRACE` seconds to report."""
    give_up = time.monotonic() + timeout if timeout else None
    stop.grace = grace
    deadline = None
    while pending := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.inbox for rank in pending] + [rank.process.sentinel for rank in pending], timeout=0.2)
        for rank in pending:
            if rank.inbox in ready or rank.process.sentinel in ready:
                _read(rank, ranks.index(rank))
        now = time.monotonic()
        stop.pass_on(ranks)
        reports = [rank.report for rank in ranks if rank.report]
        if stop.asked and any(report.by_stop for report in reports):
            raise Interrupted(stop.asked)
        if reports and deadline is None:
            deadline = now + (rank_reports.PATIENCE if reports[0].timed_out else GRACE)
        if deadline is not None and (now > deadline or len(reports) == len(pending)):
            return reports
        if give_up is not None and now > give_up:
            late = UserError(f"The ranks did not end within {timeout:g} s.")
            return reports or [RankReport(-1, now, str(late), late)]
    return [rank.report for rank in ranks if rank.report]


def _read(rank: _Rank, number: int) -> None:
    """Read a rank's result or report. If it died without one, report how it died."""
    try:
        if rank.inbox.poll():
            kind, payload = pickle.loads(rank.inbox.recv_bytes())
            rank.done = True
            if kind == "value":
                rank.value = payload
            else:
                rank.report = payload
            return
    except EOFError:
        pass
    rank.process.join(timeout=1.0)
    code = rank.process.exitcode
    if code is None:
        return
    rank.done = True
    how = f"was killed by {name_of(-code)}" if code < 0 else f"exited with code {code}"
    if code in (-signal.SIGKILL, 255):  # 255: of a process whose fork server was killed
        how += "; perhaps the machine had no memory left"
    by_stop = code in {128 + signum for signum in ASKING}
    rank.report = RankReport(number, time.monotonic(), f"the process {how}", by_stop=by_stop, killed=code < 0)


def _failure(reports: list[RankReport], world_size: int, log_dir: Path | None) -> UserError:
    first = rank_reports.first_of(reports)
    if first.mistake is not None:
        return first.mistake
    run_dir = log_dir.parent if log_dir else None
    if (hung := rank_reports.waited_for(reports, world_size, run_dir)) is not None:
        return RankFailed(hung, first.rank)
    log = str(log_dir / f"rank{first.rank}.log") if log_dir and first.rank else None
    return RankFailed(
        rank_reports.in_words(dataclasses.replace(first, log=log), run_dir), first.rank, killed=first.killed
    )


def report_of(rank: int, error: BaseException, at: float) -> RankReport:
    """Return what a rank reports of the error that ends it."""
    mistake = error if isinstance(error, UserError) else None
    text = str(error) if mistake else "".join(traceback.format_exception(error))
    killed = isinstance(error, RankFailed) and error.killed  # a rank that this process started
    return RankReport(rank, at, text, mistake, task=meeting.task(), killed=killed)


def report_here(error: BaseException) -> None:
    """Report why a process of a Slurm job ended before it was a rank, for the batch script's verdict."""
    if (known := meeting.run_dir()) is not None:
        message = explain(error)
        shown = error if message is None or isinstance(error, RankFailed) else UserError(message)
        report = report_of(sizes.joined_rank() or 0, shown, time.time())
        rank_reports.write(known, meeting.start_of_job(), report)


def _send(rank: _Rank, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        os.kill(rank.process.pid, signum)


def _end(ranks: list[_Rank], reason: int) -> None:
    for rank in ranks:
        if rank.process.is_alive() and not (rank.done and rank.report is None):
            _send(rank, reason)
    deadline = time.monotonic() + KILL_AFTER
    for rank in ranks:
        rank.process.join(timeout=max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
        rank.inbox.close()


class _Stop:
    """The request to stop this process. It ends all ranks; with a grace, it is first passed on to them."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.grace = 0.0
        self.run_dir: Path | None = None
        self.when_stopped: Callable[[], None] = lambda: None
        self.passed_on = False
        self._deadline = 0.0

    def hear(self, signum: int, _frame: object) -> None:
        again, self.asked = self.asked is not None, self.asked or signal.Signals(signum)
        if not self.grace or (again and signum == signal.SIGINT):
            raise Interrupted(self.asked)

    def pass_on(self, ranks: Sequence[_Rank]) -> None:
        if self.asked is None:
            return
        if not self.passed_on:
            self.passed_on, self._deadline = True, time.monotonic() + self.grace
            for rank in ranks:
                if not rank.done and rank.process.is_alive():
                    _send(rank, PASSED_ON[self.asked])
            self.when_stopped()
            again = self.asked is signal.SIGINT
            say_at_once(rank_progress.once_asked(self.run_dir, self.asked.name, self.grace, again=again))
        elif time.monotonic() > self._deadline:
            raise Interrupted(self.asked)


@contextlib.contextmanager
def signals_raise() -> Iterator[_Stop]:
    """While ranks run, turn every signal that asks for a stop into `Interrupted`, so that the ranks end first."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {signum: signal.signal(signum, stop.hear) for signum in ASKING}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- inside a rank ----


def _rank_main(
    target: Callable[..., Any],
    spec: RankSpec,
    outbox: Connection,
    leash: Connection,
    log: str | None,
    args: bytes,
) -> None:
    # Plain pickle both ways: multiprocessing would pass tensors as handles to memory of a process that ends.
    def say(kind: str, payload: Any) -> None:
        outbox.send_bytes(pickle.dumps((kind, payload)))

    threading.Thread(target=_end_with_launcher, args=(leash,), daemon=True).start()
    hear_stops(under_launcher=True)
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)

    def tell(error: BaseException) -> None:
        report = report_of(spec.rank, error, time.monotonic())
        say("report", report)
        sys.stderr.write(report.text + "\n" if spec.rank else "")
        sys.stderr.flush()

    watch.report_by(tell)
    try:
        say("value", target(spec, *pickle.loads(args)))
    except BaseException as error:
        if isinstance(stop := cause_of(error), Terminated):
            os._exit(stop.exit_code)
        ignore_stops()  # the launcher may already be ending this rank; report first
        tell(error)
        # Exit at once: peers that wait for this rank must see its connections close. The interpreter's normal exit
        # would tear the process group down, and may wait for the peers.
        os._exit(1)


def _end_with_launcher(leash: Connection) -> None:
    """Nobody writes to the leash. It closes when the launcher ends, however it was killed, and then this rank ends."""
    with contextlib.suppress(EOFError, OSError):
        leash.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)
