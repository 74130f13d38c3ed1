"""The process that runs a user's reward function, and the messages between it and its rank.

    python -m rlexp.training.rollout.rewards.worker FUNCTION REQUESTS REPLIES LEASH

The last three are file descriptors of pipes, so the function may print freely. A message is JSON.
Requests: `{}` to import the function, or `{"prompts", "answers", "rows"}` to call it. Replies: `{"scores": […]}`;
`{"error": text}` with the last lines of a traceback; or `{"wrong": text}` if the result is no list of numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

LINES = 8  # last lines of a traceback in an error


def main() -> None:
    name, requests, replies, leash = sys.argv[1], *map(int, sys.argv[2:5])
    for fd in (requests, replies, leash):
        os.set_inheritable(fd, False)  # else a process that the function starts could keep the rank waiting
    _end_with(leash)
    for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asking, lambda *_: None)  # the rank answers these signals, and finishes its step first
    sys.argv = [name]
    function = None
    asked, answered = Connection(requests, writable=False), Connection(replies, readable=False)
    with contextlib.suppress(EOFError, OSError):  # the rank has closed its ends
        while True:
            request = json.loads(asked.recv_bytes())
            try:
                if function is None:
                    function = _imported(name)
                reply = _judged(function, request) if request else {"scores": []}
            except BaseException as error:  # SystemExit too: the rank names the sample in its error
                reply = {"error": _last_lines(error)}
            answered.send_bytes(json.dumps(reply).encode())


def _end_with(leash: int) -> None:
    """Let the kernel end this process when the rank, which holds the pipe's other end, is gone.

    This works in the middle of a call too, also in code that lets no other Python thread run.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([leash], [], [], 0)[0]:  # the rank is already gone
        os._exit(1)


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is not a function, but {type(function).__name__}")
    return function


def _judged(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    result = function(request["prompts"], request["answers"], request["rows"])
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        return {"wrong": f"returned {type(result).__name__}, not a list of numbers"}
    scores = []
    for value in result:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            scores.append(float(value))
        except (TypeError, ValueError, OverflowError):
            return {"wrong": f"returned a list with {value!r:.80}, which is not a number"}
    return {"scores": scores}


def _last_lines(error: BaseException) -> str:
    """Return the traceback's last lines, without the lines of this file."""
    own: TracebackType | None = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    lines = "".join(traceback.format_exception(type(error), error, own)).strip().splitlines()
    return "\n".join(lines[-LINES:])


if __name__ == "__main__":
    main()
