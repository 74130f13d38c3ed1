"""Calls in processes of their own, several at a time.

Each rehearsal has its own: DeepSpeed keeps its groups for a process's life. Processes are forked, by one thread, when
everything is imported.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
from collections.abc import Callable, Generator, Sequence
from typing import Any

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Calls = Generator[Sequence[Call], Any, Any]  # yields calls that may run side by side, and is sent their results


def at_once(tasks: Sequence[Calls], processes: int) -> list[Any]:
    """Run tasks that need calls in processes of their own, so many calls at a time; return each task's result."""
    results: list[Any] = [None] * len(tasks)
    answers: list[list[Any]] = [[] for _ in tasks]
    waiting: list[tuple[int, int, Call]] = []
    running: dict[int, tuple[int, int, int]] = {}  # by pipe: the task, the place of the call, and the process

    def go_on(task: int, *, error: BaseException | None = None) -> None:
        try:
            calls = tasks[task].throw(error) if error is not None else tasks[task].send(answers[task] or None)
        except StopIteration as end:
            results[task] = end.value
            return
        answers[task] = [_PENDING] * len(calls)
        waiting.extend((task, place, call) for place, call in enumerate(calls))

    gc.collect()
    gc.freeze()  # DeepSpeed calls the collector again and again: it need not look at what was imported
    try:
        for task in range(len(tasks)):
            go_on(task)
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < processes:
                    task, place, call = waiting.pop(0)
                    pipe, process = _forked(*call)
                    running[pipe] = (task, place, process)
                    selector.register(pipe, selectors.EVENT_READ)
                for key, _ in selector.select():
                    selector.unregister(key.fd)
                    task, place, process = running.pop(key.fd)
                    said, error = _result(key.fd, process)
                    answers[task][place] = said
                    if error is not None:
                        waiting[:] = [each for each in waiting if each[0] != task]
                        go_on(task, error=error)
                    elif not any(each is _PENDING for each in answers[task]):
                        go_on(task)
    finally:
        gc.unfreeze()
        for pipe, (_, _, process) in running.items():
            os.close(pipe)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return results


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
        os.close(read)
        try:
            said: tuple[Any, BaseException | None] = (function(*args), None)
        except Exception as error:
            said = (None, error)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(said, pipe)
        code = 0
    finally:
        os._exit(code)


def _result(pipe: int, process: int) -> tuple[Any, BaseException | None]:
    with os.fdopen(pipe, "rb") as file:
        said = file.read()
    _, status = os.waitpid(process, 0)
    if not said:
        return None, RuntimeError(f"a rehearsal ended with status {os.waitstatus_to_exitcode(status)}")
    result: tuple[Any, BaseException | None] = pickle.loads(said)
    return result
