"""The machine under a lab: packages, devices, ports, /etc/hosts, and processes, which tests elsewhere ask for too."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOSTS = Path("/etc/hosts")
FIRST_PORT, LAST_PORT = 18200, 30000


class Unable(Exception):
    """Why there can be no lab here, in one line."""


def refuse_unless_possible(folder: Path) -> None:
    if os.geteuid() != 0:
        raise Unable("a Slurm of one's own needs root: its daemons run jobs for every user.")
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise Unable("there is no apt-get: the packages of Slurm are Debian's and Ubuntu's.")
    if len(str(folder)) > 80 or set(" %[],=#") & set(str(folder)):
        raise Unable(f"{folder}: sockets lie in it, and Slurm reads its name. It must be short and plain; set TMPDIR.")


def install(packages: Sequence[str], log: Path) -> None:
    """Those that are missing. None of their daemons is started: this machine's services are not the lab's."""
    known = subprocess.run(["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *packages],
                           capture_output=True, text=True, check=False).stdout  # fmt: skip
    missing = [package for package in packages if f"{package} installed" not in known.splitlines()]
    if not missing:
        return
    with log.open("w", encoding="utf-8") as out, no_services():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            code = subprocess.run(["apt-get", *command], stdout=out, stderr=out, env=quiet, check=False).returncode
            if code and command[0] == "install":
                said = last_line(log.read_text(encoding="utf-8"))
                raise Unable(f"apt-get cannot install {', '.join(missing)}: {said}")


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Debian asks this file whether a package's daemon may be started."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def make_device(path: Path) -> None:
    """What stands for a GPU: a device file that reads as /dev/null does."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        raise Unable(f"{path}: no device file can be made here, so there are no GPUs to declare ({error}).") from None


def free_ports(count: int) -> int:
    """The first of `count` ports in a row on which nobody listens, below those that are handed out by chance."""
    for first in range(FIRST_PORT, LAST_PORT, 20 + count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(contextlib.closing(socket.socket())).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise Unable(f"no {count} ports in a row are free between {FIRST_PORT} and {LAST_PORT}.")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two labs that come up together would find the same ports free."""
    with (Path(tempfile.gettempdir()) / "rlexp-slurm.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def hosts_file() -> Iterator[list[str]]:
    """The lines of /etc/hosts, to be changed. In place: in a container the file cannot be replaced."""
    with HOSTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read().splitlines()
        lines = list(before)
        yield lines
        if lines != before:
            file.seek(0)
            file.write("".join(f"{line}\n" for line in lines))
            file.truncate()


@dataclass(frozen=True)
class Process:
    name: str
    parent: int


def processes() -> dict[int, Process]:
    """All that live; what has ended and was not yet asked for does not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            state, parent = after.split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = Process(before.partition("(")[2], int(parent))
    return found


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; nothing once it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def has_open(pid: int, path: Path) -> bool:
    """Whether a process holds this file, or a file in this folder, open."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(link))
                if path == target or path in target.parents:
                    return True
    return False


def below(table: dict[int, Process], roots: Iterable[int]) -> list[int]:
    """The processes that these have started, and those have, and so on."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found, open_ = [], list(roots)
    while open_:
        next_ = children.get(open_.pop(), [])
        found += next_
        open_ += next_
    return found


def above(table: dict[int, Process], pid: int) -> list[int]:
    found = []
    while pid in table and table[pid].parent:
        pid = table[pid].parent
        found.append(pid)
    return found


def wait_until(happens: Callable[[], bool], within: float, *, every: float = 0.05) -> bool:
    until = time.monotonic() + within
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
