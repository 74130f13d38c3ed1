"""Command lines as a user types them, without the seconds that importing torch takes each of them.

A server has imported what a run imports, and forks a process for each command: with the folder, the environment and the
arguments that it would have had, it runs the module as `python -m` does, and its ranks are forked from it in turn. What
does not go this way starts Python: sweeps, and every test that watches processes end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 1 << 20  # bytes of a request: arguments and environment
READY = b"ready"


def run(
    module: str, args: Sequence[str], cwd: Path, *, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for `python -m MODULE ARGS`."""
    request = {"module": module, "args": args, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        server = _server()
        socket.send_fds(server, [json.dumps(request).encode()], [stdout.fileno(), stderr.fileno()])
        pid = int(server.recv(100))
        server.settimeout(timeout)
        try:
            code = int(server.recv(100))
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            server.settimeout(None)
            server.recv(100)  # that it has ended
            raise subprocess.TimeoutExpired(["python", "-m", module, *args], timeout, *_said(stdout, stderr)) from None
        server.settimeout(None)
        return subprocess.CompletedProcess(["python", "-m", module, *args], code, *_said(stdout, stderr))


def _said(*files: Any) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read().decode() for file in files]


@functools.cache
def _server() -> socket.socket:
    """Ours of its two ends: the server lives as long as this process holds it. Until it is ready a minute may pass on
    a busy machine, which is no command's own time."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    with theirs:
        subprocess.Popen([sys.executable, "-m", "tests.warm", str(theirs.fileno())], cwd=ROOT, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])  # fmt: skip
    assert ours.recv(100) == READY, "the server of tests/warm.py has not started"
    return ours


# ---- in the server ----


def serve(requests: socket.socket) -> None:
    from rlexp.launch.local import PRELOAD

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then lets go of the other end
    for name in (*PRELOAD, "hydra", "deepspeed", "rlexp.launch.job"):
        importlib.import_module(name)
    gc.freeze()  # or each fork would write to, and so copy, every page of it
    requests.send(READY)
    while True:
        request, files, _, _ = socket.recv_fds(requests, LONGEST, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            become(json.loads(request), *files)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Of this fork, what `python -m` would have started; it ends as that does."""
    from rlexp.launch import local

    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, 1 + max(stdout, stderr))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["args"]
    local._context = functools.partial(_forked, local._context)
    leave(_code_of(request["module"]))


def _code_of(module: str) -> int:
    """As Python's own: of an error that nobody catches its traceback, and 1."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """Threads and exit handlers as at every end; but what torch has made is not taken apart, object by object."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forked(otherwise: Any, device: str, preload: Sequence[str]) -> Any:
    """Ranks are forked from the launcher, which has imported by now what their fork server would import."""
    if device != "cpu":
        return otherwise(device, preload)
    for name in preload:
        importlib.import_module(name)
    return multiprocessing.get_context("fork")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
