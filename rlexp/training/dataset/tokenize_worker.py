"""Processes that tokenize parts of a data set beside each other, and the one that runs in each.

    python -m rlexp.training.dataset.tokenize_worker REQUESTS REPLIES

Both are file descriptors of pipes. A message is a pickle: where modules are looked for, the recipe, then one part after
the other, each answered by its block, or by the exception that it raised.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlexp.base.errors import DataError
from rlexp.training.dataset.recipe import Recipe
from rlexp.training.dataset.row_files import FilePart, PartOf
from rlexp.training.dataset.store import Block
from rlexp.training.dataset.tokens import Refused

AHEAD = 2  # parts that a process is given before the first is answered
Made = tuple[Block, list[Refused]]


def packed(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class Ended(DataError):
    """A process is gone: the rows are not at fault."""


class TokenizeWorker:
    """A process that tokenizes, and the thread that hands it what to do, so that nobody waits with a full pipe.

    The process ends when this end of its pipes is closed, or this process dies.
    """

    def __init__(self, recipe: bytes) -> None:
        asked, self._requests = Pipe(duplex=False)
        self._replies, answered = Pipe(duplex=False)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with asked, answered:
            theirs = asked.fileno(), answered.fileno()
            command = [sys.executable, "-m", "rlexp.training.dataset.tokenize_worker", *map(str, theirs)]
            self.process = subprocess.Popen(command, pass_fds=theirs, env=environment, stdin=subprocess.DEVNULL)
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_over, name="tokenizing", daemon=True)
        self._thread.start()
        self._waiting.put(packed(sys.path))
        self._waiting.put(recipe)

    def _hand_over(self) -> None:
        with contextlib.suppress(OSError), self._requests:  # of a process that is gone: `answer` says how it ended
            while (message := self._waiting.get()) is not None:
                self._requests.send_bytes(message)

    def ask(self, part: PartOf) -> None:
        self._waiting.put(packed(part))

    def answer(self) -> Made:
        try:
            made = self._replies.recv()
        except (EOFError, OSError):
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
        message = packed(recipe)
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
    with contextlib.suppress(EOFError, OSError):  # the process that asks is gone
        answer_all(Connection(asked, writable=False), Connection(answered, readable=False))


def answer_all(requests: Connection, replies: Connection) -> None:
    sys.path[:] = requests.recv()  # where the code of a tokenizer of one's own may lie
    block: Callable[[int, FilePart], Made] | None = None
    while True:
        message = requests.recv_bytes()
        try:
            request = pickle.loads(message)
            if block is None:
                block = request.block
                continue
            reply: Any = block(*request)
        except Exception as error:
            reply = error if isinstance(error, DataError) else DataError(f"{type(error).__name__}: {error}")
        replies.send_bytes(packed(reply))


if __name__ == "__main__":
    main()
