"""Processes that tokenize parts of a data set beside each other, and the one that runs in each.

    python -m rlexp.data.worker REQUESTS REPLIES

Both are file descriptors of pipes. A message is its length and then a pickle: first the recipe, then one part after the
other, each answered by its block, or by the exception that it raised.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from rlexp.data.files import Part
from rlexp.data.recipe import Problem, Recipe
from rlexp.data.store import Block
from rlexp.errors import DataError

HEADER = struct.Struct(">Q")
AHEAD = 2  # parts that a process is given before the first is answered
Made = tuple[Block, list[Problem]]
PartOf = tuple[int, Part]  # a file's number, and a part of it


def send(pipe: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(HEADER.pack(len(body)) + body)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Return the next message; raise EOFError when the other end is closed."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(head)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


class Worker:
    """A process that tokenizes. It ends when this end of its pipes is closed, or this process dies."""

    def __init__(self, recipe: bytes) -> None:
        asked, requests = os.pipe()
        replies, answered = os.pipe()
        command = [sys.executable, "-m", "rlexp.data.worker", str(asked), str(answered)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=(asked, answered), env=environment, stdin=subprocess.DEVNULL)
        os.close(asked)
        os.close(answered)
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self._requests.write(recipe)

    def ask(self, part: PartOf) -> None:
        with contextlib.suppress(BrokenPipeError):  # `answer` says how it ended
            send(self._requests, part)

    def answer(self) -> Made:
        try:
            made = receive(self._replies)
        except EOFError:
            code = self.process.wait()
            raise DataError(
                f"a process that tokenizes ended (exit code {code}). If its memory ran out, use fewer: data.workers=1."
            ) from None
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        self.process.kill()
        self.process.wait()


def made_beside(recipe: Recipe, parts: Iterable[PartOf], workers: int) -> Iterator[Made]:
    """Tokenize parts in so many processes, and yield what they become, in order; a few parts are in flight."""
    with contextlib.ExitStack() as closing:
        head = pickle.dumps(recipe, protocol=pickle.HIGHEST_PROTOCOL)
        message = HEADER.pack(len(head)) + head
        pool: list[_Line] = []
        for _ in range(workers):
            worker = Worker(message)
            closing.callback(worker.close)
            pool.append(_Line(worker))
        waiting: deque[_Line] = deque()
        for number, part in enumerate(parts):
            line = pool[number % workers]
            if len(waiting) == workers * AHEAD:
                yield waiting.popleft().next()
            line.put(part)
            waiting.append(line)
        while waiting:
            yield waiting.popleft().next()


class _Line:
    """A worker with a thread that hands it parts, so that neither waits for the other with a full pipe."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parts: queue.SimpleQueue[PartOf] = queue.SimpleQueue()
        threading.Thread(target=self._feed, name="tokenizing", daemon=True).start()

    def _feed(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # closed
            while True:
                self._worker.ask(self._parts.get())

    def put(self, part: PartOf) -> None:
        self._parts.put(part)

    def next(self) -> Made:
        return self._worker.answer()


def main() -> None:
    for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asking, signal.SIG_IGN)  # it ends with the process that asked for it
    asked, answered = map(int, sys.argv[1:3])
    gone = contextlib.suppress(EOFError, BrokenPipeError)
    with os.fdopen(asked, "rb") as requests, os.fdopen(answered, "wb") as replies, gone:
        answer_all(receive(requests).block, requests, replies)


def answer_all(block: Callable[[int, Part], Made], requests: BinaryIO, replies: BinaryIO) -> None:
    while True:
        file, part = receive(requests)
        try:
            reply: Any = block(file, part)
        except Exception as error:
            reply = DataError(f"{type(error).__name__}: {error}") if not isinstance(error, DataError) else error
        send(replies, reply)


if __name__ == "__main__":
    main()
