"""Processes that tokenize parts of a data set beside each other, and the one that runs in each.

    python -m rlexp.training.dataset.tokenize_worker REQUESTS REPLIES

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

from rlexp.base.errors import DataError
from rlexp.training.dataset.recipe import Problem, Recipe
from rlexp.training.dataset.row_files import FilePart
from rlexp.training.dataset.store import Block

HEADER = struct.Struct(">Q")
AHEAD = 2  # parts that a process is given before the first is answered
Made = tuple[Block, list[Problem]]
PartOf = tuple[int, FilePart]  # a file's number, and a part of it


def packed(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def receive(pipe: BinaryIO) -> Any:
    return pickle.loads(received(pipe))


def received(pipe: BinaryIO) -> bytes:
    """Return the next message; raise EOFError when the other end is closed."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(head)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return body


class Ended(DataError):
    """A process is gone: the rows are not at fault."""


class TokenizeWorker:
    """A process that tokenizes, and the thread that hands it what to do, so that nobody waits with a full pipe.

    The process ends when this end of its pipes is closed, or this process dies.
    """

    def __init__(self, recipe: bytes) -> None:
        asked, requests = os.pipe()
        replies, answered = os.pipe()
        command = [sys.executable, "-m", "rlexp.training.dataset.tokenize_worker", str(asked), str(answered)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=(asked, answered), env=environment, stdin=subprocess.DEVNULL)
        os.close(asked)
        os.close(answered)
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_over, name="tokenizing", daemon=True)
        self._thread.start()
        self._waiting.put(recipe)

    def _hand_over(self) -> None:
        with contextlib.suppress(OSError), self._requests:  # of a process that is gone: `answer` says how it ended
            while (message := self._waiting.get()) is not None:
                self._requests.write(message)
                self._requests.flush()

    def ask(self, part: PartOf) -> None:
        self._waiting.put(packed(part))

    def answer(self) -> Made:
        try:
            made = receive(self._replies)
        except EOFError:
            code = self.process.wait()
            hint = " If memory ran out, use fewer: data.workers=1." if code == -signal.SIGKILL else ""
            raise Ended(f"a process that tokenizes ended (exit code {code}).{hint}") from None
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._waiting.put(None)
        self._thread.join()
        self._replies.close()


def made_beside(recipe: Recipe, parts: Iterable[PartOf], workers: int) -> Iterator[Made]:
    """Tokenize parts in so many processes, and yield what they become, in order; a few parts are in flight."""
    with contextlib.ExitStack() as closing:
        message = packed(sys.path) + packed(recipe)
        pool = [TokenizeWorker(message) for _ in range(workers)]
        for worker in pool:
            closing.callback(worker.close)
        waiting: deque[TokenizeWorker] = deque()
        for number, part in enumerate(parts):
            if len(waiting) == workers * AHEAD:
                yield waiting.popleft().answer()
            worker = pool[number % workers]
            worker.ask(part)
            waiting.append(worker)
        while waiting:
            yield waiting.popleft().answer()


def main() -> None:
    for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asking, signal.SIG_IGN)  # it ends with the process that asked for it
    asked, answered = map(int, sys.argv[1:3])
    gone = contextlib.suppress(EOFError, BrokenPipeError)
    with os.fdopen(asked, "rb") as requests, os.fdopen(answered, "wb") as replies, gone:
        sys.path[:] = receive(requests)  # where the code of a tokenizer of one's own may lie
        answer_all(requests, replies)


def answer_all(requests: BinaryIO, replies: BinaryIO) -> None:
    block: Callable[[int, FilePart], Made] | None = None
    while True:
        message = received(requests)
        try:
            request = pickle.loads(message)
            if block is None:
                block = request.block
                continue
            reply: Any = block(*request)
        except Exception as error:
            reply = error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}")
        replies.write(packed(reply))
        replies.flush()


if __name__ == "__main__":
    main()
