"""Calls in processes of their own, several at a time.

Each rehearsal has its own: DeepSpeed keeps its groups for a process's life. Processes are forked, by one thread, when
everything is imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.launch.stops import end_with_parent

Call = tuple[Callable[..., Any], tuple[Any, ...]]
# A task yields what may run side by side, calls and tasks, and is sent their results.
Calls = Generator[Sequence["Call | Calls"], Any, Any]


Watch = Callable[[Sequence[Call], int], None]  # is given the calls that run, and the number of those that are done
ASKED_EVERY = 1.0  # seconds between two calls of it


def at_once(tasks: Sequence[Calls], processes: int, watch: Watch | None = None) -> list[Any]:
    """Run tasks that need calls in processes of their own, so many calls at a time; return each task's result."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # DeepSpeed calls the collector again and again: it need not look at what was imported
    pool = _Pool(processes, watch)
    try:
        return pool.run(tasks)
    finally:
        if not frozen:  # by whoever calls
            gc.unfreeze()
        pool.end()


@dataclass(eq=False)
class _Batch:
    """What a task needs before it goes on. After an error it goes on at once, and its batch is an old one."""

    task: _Task
    answers: list[Any]


@dataclass(eq=False)
class _Task:
    steps: Calls
    urgency: tuple[int, ...]  # the first tasks may take longest, and of these the first of what they need
    asked_by: tuple[_Batch, int] | None = None  # which waits for the result, and the place among its answers
    batch: _Batch | None = None


class _Pool:
    def __init__(self, processes: int, watch: Watch | None) -> None:
        self.processes, self.watch, self.done = processes, watch, 0
        self.waiting: list[tuple[_Batch, int, Call]] = []
        # by pipe: who needs it, at which place, and the process with its call
        self.running: dict[int, tuple[_Batch, int, int, Call]] = {}
        self.results: list[Any] = []

    def run(self, tasks: Sequence[Calls]) -> list[Any]:
        self.results = [None] * len(tasks)
        for number, steps in enumerate(tasks):
            self._go_on(_Task(steps, (number,)))
        with selectors.DefaultSelector() as selector:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.processes:
                    batch, place, call = self.waiting.pop(0)
                    pipe, process = _forked(*call)
                    self.running[pipe] = (batch, place, process, call)
                    selector.register(pipe, selectors.EVENT_READ)
                if self.watch is not None:
                    self.watch([call for *_, call in self.running.values()], self.done)
                for key, _ in selector.select(None if self.watch is None else ASKED_EVERY):
                    selector.unregister(key.fd)
                    batch, place, process, _ = self.running[key.fd]
                    result = _result(key.fd, process)
                    del self.running[key.fd]
                    self.done += 1
                    self._answer(batch, place, *result)
        return self.results

    def _go_on(self, task: _Task, error: BaseException | None = None) -> None:
        """Take a task to what it needs next, or to its end."""
        try:
            sent = None if task.batch is None else task.batch.answers
            needs = list(task.steps.throw(error) if error is not None else task.steps.send(sent))
        except StopIteration as end:
            self._end(task, end.value, None)
            return
        except Exception as wrong:
            self._end(task, None, wrong)
            return
        batch = task.batch = _Batch(task, [_PENDING] * len(needs))
        for place, need in enumerate(needs):
            if isinstance(need, Generator):
                self._go_on(_Task(need, (*task.urgency, place), (batch, place)))
            else:
                self.waiting.append((batch, place, need))
            if task.batch is not batch:
                return
        if not needs:
            self._go_on(task)
        self.waiting.sort(key=lambda each: each[0].task.urgency)

    def _end(self, task: _Task, value: Any, error: BaseException | None) -> None:
        task.batch = None  # answers that are still to come are for nobody
        if task.asked_by is not None:
            self._answer(*task.asked_by, value, error)
        elif error is not None:
            raise error
        else:
            self.results[task.urgency[0]] = value

    def _answer(self, batch: _Batch, place: int, answer: Any, error: BaseException | None) -> None:
        task = batch.task
        if task.batch is not batch:
            return
        batch.answers[place] = answer
        if error is not None:
            self.waiting = [each for each in self.waiting if batch not in _line(each[0])]
            self._go_on(task, error)
        elif not any(each is _PENDING for each in batch.answers):
            self._go_on(task)

    def end(self) -> None:
        for pipe, (_, _, process, _) in self.running.items():
            with contextlib.suppress(OSError):  # the search may have been ended while an answer was read
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _line(batch: _Batch) -> Iterator[_Batch]:
    """Yield a batch, the one that waits for its task, and so on."""
    yield batch
    while (asked_by := batch.task.asked_by) is not None:
        batch = asked_by[0]
        yield batch


_PENDING = object()


def _forked(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int]:
    """Start a call in a forked process; return the pipe for its result, and the process."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return read, process
    code = 1
    try:
        end_with_parent()
        os.close(read)
        try:
            packed = _packed(function(*args), None)
        except Exception as error:
            packed = _packed(None, error)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(packed)
        code = 0
    finally:
        os._exit(code)


def _packed(value: Any, error: Exception | None) -> bytes:
    """Return what can be read again: not every error can."""
    try:
        packed = pickle.dumps((value, error))
        pickle.loads(packed)
    except Exception as wrong:
        cause = error or wrong
        packed = pickle.dumps((None, RuntimeError(f"{type(cause).__name__}: {cause}")))
    return packed


def _result(pipe: int, process: int) -> tuple[Any, BaseException | None]:
    with os.fdopen(pipe, "rb") as file:
        packed = file.read()
    _, status = os.waitpid(process, 0)
    if not packed:
        return None, RuntimeError(f"a rehearsal ended with status {os.waitstatus_to_exitcode(status)}")
    result: tuple[Any, BaseException | None] = pickle.loads(packed)
    return result
