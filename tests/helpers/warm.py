"""Start commands and fork servers for the tests without the seconds that importing torch takes.

One server for the whole session has imported what a run imports. It forks a process for each command, with the folder,
the environment and the arguments that the command would have had; the process runs the module as `python -m` does. The
command's own fork server is forked from the command, so launcher, fork server and ranks stand as a shell's would.
`run` waits for a command, `start` watches one, and `fork_server` gives the test process itself a fork server. What
Slurm, torchrun and submitit start, and one test of each kind, starts Python as a user does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from tests.helpers.paths import ROOT
from tests.helpers.planted import plant_if_asked

MEETING = "RLEXP_TEST_WARM"  # names the server's folder, and the process that the server does not outlive
LONGEST = 1 << 20  # bytes of a request: arguments and environment
MOST_FILES = 8  # that go with a request
HIGH = 512  # above all descriptors that a process here has open
ENDED = "the server of tests/helpers/warm.py has ended"
spawn = util.spawnv_passfds
# What runs import when they need it, if these versions have it: parts of DeepSpeed, and what W&B begins with.
LATER = ("deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops", "distutils.ccompiler",
         "wandb.sdk.launch", "opentelemetry.exporter.otlp.proto.http._log_exporter",
         "opentelemetry.exporter.otlp.proto.http.metric_exporter", "pandas", "requests")  # fmt: skip


def run(
    module: str, args: Sequence[str], cwd: Path, *, timeout: float = 280, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for `python -m MODULE ARGS`."""
    process = start(module, args, cwd, env=env)
    try:
        said = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired(process.args, timeout, *process.communicate()) from None
    return subprocess.CompletedProcess(process.args, process.wait(), *said)


def start(
    module: str, args: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None, stderr: int | None = None
) -> Process:
    """What `subprocess.Popen` gives for `python -m MODULE ARGS`, or for `python -c` where that is the module, as the
    leader of a process group. What it says goes to files, and its errors to the descriptor `stderr` if one is given."""
    what = {"code": args[0], "args": list(args[1:])} if module == "-c" else {"module": module, "args": list(args)}
    request = {**what, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    return Process(["python", *(["-m"] if "module" in what else []), module, *args], request, stderr)


class Process:
    """The part of `subprocess.Popen` that the tests use. The server kills its process group when this is let go of."""

    def __init__(self, args: Sequence[str], request: dict[str, Any], stderr: int | None) -> None:
        self.args = args
        self.returncode: int | None = None
        self._said = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        out, err = (file.fileno() for file in self._said)
        self._server, self.pid = _asked(request, [out, err if stderr is None else stderr])

    @property
    def stderr(self) -> IO[str]:
        """What it has said so far."""
        return open(f"/proc/self/fd/{self._said[1].fileno()}", encoding="utf-8")

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            answer = self._server.recv(100)
            assert answer, ENDED
            self.returncode = int(answer)
            self._server.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for file in self._said:
            file.seek(0)
        return self._said[0].read().decode(), self._said[1].read().decode()

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Worker(Process):
    """A process that runs code and is spoken with over pipes, as pytest-xdist does with its workers. It stays in the
    terminal's process group, so Ctrl-C reaches it."""

    def __init__(self, code: str) -> None:
        self.args, self.returncode, self._said = ["python", "-c", code], None, []
        (asked, ask), (heard, said) = os.pipe(), os.pipe()
        request = {"code": code, "args": [], "files": [0], "cwd": os.getcwd(), "env": dict(os.environ), "group": False}
        self._server, self.pid = _asked(request, [said, 2, asked])
        os.close(asked)
        os.close(said)
        self.stdin, self.stdout = os.fdopen(ask, "wb"), os.fdopen(heard, "rb")


def fork_server(path: str, args: Sequence[str], files: Sequence[int]) -> int:
    """Stand in for `multiprocessing.util.spawnv_passfds` in a process that is not itself forked here. The server forks
    the fork server; a process that waits for the end of the same pipe stands for it among this process's children."""
    if "multiprocessing.forkserver" not in args[-1]:
        return int(spawn(path, args, files))
    request = {"code": args[-1], "args": [], "files": list(files), "cwd": os.getcwd(), "env": dict(os.environ)}
    waiting = subprocess.Popen(["cat"], stdin=files[1], stdout=subprocess.DEVNULL)
    _kept.append((_asked(request, [1, 2, *files])[0], waiting))
    return waiting.pid


_kept: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []  # the server kills what nobody waits for


def _asked(request: dict[str, Any], files: Sequence[int]) -> tuple[socket.socket, int]:
    """The connection that the exit code comes over, and the pid. Until the server has started, a minute may pass on a
    busy machine, which is no command's own time."""
    connection = _connected(*_meeting())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    blocked = [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    socket.send_fds(connection, [json.dumps(request | {"blocked": blocked}).encode()], files)
    answer = connection.recv(100)
    assert answer, ENDED
    return connection, int(answer)


def _connected(folder: Path, owner: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(folder / "socket"))
        except FileNotFoundError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(128)
                subprocess.Popen(
                    [sys.executable, "-m", "tests.helpers.warm", str(listener.fileno()), str(folder), str(owner)],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                )  # fmt: skip
            connection.connect(str(folder / "socket"))
    return connection


@functools.cache
def _meeting() -> tuple[Path, int]:
    folder, _, owner = meet().rpartition(":")
    return Path(folder), int(owner)


def meet() -> str:
    """Make the folder in which all processes of one pytest run find its server."""
    if MEETING not in os.environ:
        folder = tempfile.mkdtemp(prefix="rlexp-warm-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[MEETING] = f"{folder}:{os.getpid()}"
    return os.environ[MEETING]


# ---- in the server ----


class Server:
    """Forks a process for each connection, and sends over it the pid and, in the end, the exit code."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self.listener, self.owner = listener, os.pidfd_open(owner)
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wake, False)
        self.clients: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        for file in (listener, self.owner, self.woken):
            self.selector.register(file, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the owner has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake)
        while True:
            ready = [key.fileobj for key, _ in self.selector.select()]
            if self.owner in ready:
                break
            if self.woken in ready:
                self.reap()
            if self.listener in ready:
                client, _ = self.listener.accept()
                self.selector.register(client, selectors.EVENT_READ)
            for pid, client in list(self.clients.items()):
                if client in ready:
                    self.let_go(pid)
            for client in ready:
                if isinstance(client, socket.socket) and client not in (self.listener, *self.clients.values()):
                    self.begin(client)
        for pid in self.clients:
            kill_group(pid)

    def begin(self, client: socket.socket) -> None:
        if client.fileno() < 0:  # its process has just ended
            return
        request, files, _, _ = socket.recv_fds(client, LONGEST, MOST_FILES)
        if not request:
            self.selector.unregister(client)
            client.close()
            return
        pid = os.fork()
        if pid == 0:
            try:
                self.leave_to_child(client)
                become(json.loads(request), files)
            finally:
                os._exit(70)  # it has left before, unless the request is wrong
        for file in files:
            os.close(file)
        self.clients[pid] = client
        client.send(str(pid).encode())

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 65536)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self.clients.pop(ended[0])
                with contextlib.suppress(KeyError, OSError):  # nobody waits any more
                    self.selector.unregister(client)
                    client.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
                client.close()

    def let_go(self, pid: int) -> None:
        """Nobody waits for this process any more; it is reaped once it is killed."""
        self.selector.unregister(self.clients[pid])
        kill_group(pid)

    def leave_to_child(self, client: socket.socket) -> None:
        """Nothing of the server's is the child's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for each in (self.listener, client, *self.clients.values()):
            each.detach()  # or their ends would close what later has the same number


def kill_group(pid: int) -> None:
    for send in (os.kill, os.killpg):  # it may not have made its group yet
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def become(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Go on as the process that `python -m` or `python -c` would have started, and end as that does."""
    if request.get("group", True):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])  # its starter's, and not the server's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place(files, (1, 2, *request.get("files", ())))
    os.chdir(request["cwd"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["env"])
    find_modules(before, os.environ.get("PYTHONPATH", ""), request["cwd"])
    util.spawnv_passfds = fork_server_of_child  # type: ignore[assignment]
    plant_if_asked()
    sys.argv[1:] = request["args"]
    if "code" in request:
        main = sys.modules["__main__"] = ModuleType("__main__")  # or what it starts would import this module anew
        leave(_code_of(lambda: exec(request["code"], main.__dict__)))
    leave(_code_of(lambda: runpy.run_module(request["module"], run_name="__main__", alter_sys=True)))


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the open files these numbers, and close all others but standard input."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
    os.closerange(3, HIGH)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def find_modules(before: str, path: str, cwd: str) -> None:
    """As `site` does: modules come from the request's PYTHONPATH. A `sitecustomize` that is new there is imported, and
    sees every module of ours be imported, of which this process is to have none yet."""
    old, new = ([entry for entry in text.split(os.pathsep) if entry] for text in (before, path))
    sys.path[:] = [cwd, *new, *(entry for entry in sys.path[1:] if entry not in old)]
    if any((Path(entry) / "sitecustomize.py").exists() for entry in new if entry not in old):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("rlexp", "sitecustomize")]:
            del sys.modules[name]
        importlib.import_module("sitecustomize")


def fork_server_of_child(path: str, args: Sequence[str], files: Sequence[int]) -> int:
    """Stand in for `multiprocessing.util.spawnv_passfds`: a fork server is forked, and has imported all by then."""
    if "multiprocessing.forkserver" not in args[-1]:
        return int(spawn(path, args, files))
    pid = os.fork()
    if pid == 0:
        for signum in signal.valid_signals() - {signal.SIGINT}:
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)  # a new program inherits no handler
        place([1, 2, *files], [1, 2, *files])
        leave(_code_of(lambda: exec(args[-1], {"__name__": "__main__"})))
    return pid


def _code_of(work: Callable[[], Any]) -> int:
    """As Python's own: of an error that nobody catches its traceback, and 1."""
    try:
        work()
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


def compose_once() -> None:
    """Parse what every configuration holds: parsers learn a grammar by its use, which takes half of composing."""
    from rlexp.config.load import compose_config
    from tests.helpers.parsing import parse_once

    parse_once()
    compose_config(["launch.device=cpu"])


def keep_folders() -> None:
    """Let no forked process remove the folders that W&B made when it was imported: all of them use the same."""
    for each in gc.get_objects():
        if type(each) is tempfile.TemporaryDirectory:
            atexit.unregister(each.cleanup)
            each._finalizer.detach()


def main(listener: int, folder: str, owner: int) -> None:
    from rlexp.launch.local import PRELOAD

    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # who needs the server first may have held signals back
    tempfile.tempdir = folder
    for name in (*PRELOAD, "hydra", "deepspeed", "rlexp.run.job", "rlexp.training.sinks.wandb_run", *LATER):
        with contextlib.suppress(*[ImportError] if name in LATER else []):
            importlib.import_module(name)
    tempfile.tempdir = None
    keep_folders()
    compose_once()
    gc.freeze()  # or each fork would write to, and so copy, every page of it
    try:
        with contextlib.suppress(ProcessLookupError):  # the owner has ended meanwhile
            Server(socket.socket(fileno=listener), owner).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # what libraries say when they are taken apart is for nobody


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
