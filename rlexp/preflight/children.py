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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlexp.launch.stops import end_with_parent

T = TypeVar("T")  # the result of a task
Call = tuple[Callable[..., Any], tuple[Any, ...]]
# A task yields what may run side by side, calls and tasks, and is sent their results.
Calls = Generator[Sequence[Any], Any, T]
Watch = Callable[[Sequence[Call], int], None]  # is given the calls that run, and the number of those that are done
ASKED_EVERY = 1.0  # seconds between two calls of it


def at_once(tasks: Sequence[Calls[T]], processes: int | None = None, watch: Watch | None = None) -> list[T]:
    """Run tasks that need calls in processes of their own, so many calls at a time, or one on each core; return each
    task's result."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # DeepSpeed calls the collector again and again: it need not look at what was imported
    pool = _Pool(processes or len(os.sched_getaffinity(0)), watch)
    try:
        result: list[T] = pool.run(_all(tasks))
        return result
    finally:
        if not frozen:  # by whoever calls
            gc.unfreeze()
        pool.end()


def _all(tasks: Sequence[Calls[T]]) -> Calls[list[T]]:
    return (yield tasks)


@dataclass(eq=False)
class _Task:
    steps: Calls[Any]
    urgency: tuple[int, ...] = ()  # the first tasks may take longest, and of these the first of what they need
    result_to: _Slot | None = None
    answers: list[Any] | None = None  # to what it needs before it goes on


@dataclass(frozen=True, eq=False)
class _Slot:
    """The place of an answer. After an error a task goes on at once, with other answers: these are for nobody."""

    task: _Task
    answers: list[Any]
    number: int

    @property
    def wanted(self) -> bool:
        above = self.task.result_to
        return self.task.answers is self.answers and (above is None or above.wanted)


class _Pool:
    def __init__(self, processes: int, watch: Watch | None) -> None:
        self.processes, self.watch, self.done = processes, watch, 0
        self.waiting: list[tuple[_Slot, Call]] = []
        self.running: dict[int, tuple[_Slot, int, Call]] = {}  # by pipe: who needs it, and the process with its call
        self.result: Any = None

    def run(self, steps: Calls[Any]) -> Any:
        self._go_on(_Task(steps))
        with selectors.DefaultSelector() as selector:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.processes:
                    slot, call = self.waiting.pop(0)
                    pipe, process = _forked(*call)
                    self.running[pipe] = (slot, process, call)
                    selector.register(pipe, selectors.EVENT_READ)
                if self.watch is not None:
                    self.watch([call for *_, call in self.running.values()], self.done)
                for key, _ in selector.select(None if self.watch is None else ASKED_EVERY):
                    selector.unregister(key.fd)
                    slot, process, _ = self.running[key.fd]
                    result = _result(key.fd, process)
                    del self.running[key.fd]
                    self.done += 1
                    self._answer(slot, *result)
        return self.result

    def _go_on(self, task: _Task, error: BaseException | None = None) -> None:
        """Take a task to what it needs next, or to its end."""
        try:
            needs = list(task.steps.throw(error) if error is not None else task.steps.send(task.answers))
        except StopIteration as end:
            self._answer(task.result_to, end.value, None)
            return
        except Exception as wrong:
            self._answer(task.result_to, None, wrong)
            return
        answers = task.answers = [_PENDING] * len(needs)
        for number, need in enumerate(needs):
            slot = _Slot(task, answers, number)
            if isinstance(need, Generator):
                self._go_on(_Task(need, (*task.urgency, number), slot))
            else:
                self.waiting.append((slot, need))
            if not slot.wanted:
                return
        if not needs:
            self._go_on(task)
        self.waiting.sort(key=lambda each: each[0].task.urgency)

    def _answer(self, slot: _Slot | None, answer: Any, error: BaseException | None) -> None:
        if slot is None:  # the end of all
            if error is not None:
                raise error
            self.result = answer
        elif slot.wanted:
            slot.answers[slot.number] = answer
            if error is not None:
                slot.task.answers = None
                self.waiting = [each for each in self.waiting if each[0].wanted]
                self._go_on(slot.task, error)
            elif not any(each is _PENDING for each in slot.answers):
                self._go_on(slot.task)

    def end(self) -> None:
        for pipe, (_, process, _) in self.running.items():
            with contextlib.suppress(OSError):  # the search may have been ended while an answer was read
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


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
