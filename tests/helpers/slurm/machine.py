"""The machine under a lab: packages, devices, ports, /etc/hosts, and processes. Other tests use the processes too."""

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
    """No lab is possible here; the message is one line."""


def refuse_unless_possible(folder: Path) -> None:
    if os.geteuid() != 0:
        raise Unable("a Slurm lab needs root: its daemons run jobs for every user.")
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise Unable("there is no apt-get: a Slurm lab needs the packages of Debian or Ubuntu.")
    if len(str(folder)) > 80 or set(" %[],=#") & set(str(folder)):
        raise Unable(f"{folder}: holds sockets, and its name is read by Slurm. It must be short and plain; set TMPDIR.")


def install(packages: Sequence[str], log: Path) -> None:
    """Install missing packages without starting their daemons: the lab starts its own."""
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
    """Forbid Debian to start the daemons of installed packages, by the policy file that it asks."""
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
    """Make a device file that stands for a GPU and reads as /dev/null does."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        raise Unable(f"{path}: no device file can be made here, so the lab can declare no GPUs ({error}).") from None


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row, below those that the system hands out by itself."""
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
    """Hold a lock, since two labs that come up together would find the same ports free."""
    with (Path(tempfile.gettempdir()) / "rlexp-slurm.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def hosts_file() -> Iterator[list[str]]:
    """Yield the lines of /etc/hosts to change them. Written in place, since a container's file cannot be replaced."""
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
    """Return all living processes, without zombies."""
    alive = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            state, parent = after.split()[:2]
            if state not in "ZX":
                alive[int(path.parent.name)] = Process(before.partition("(")[2], int(parent))
    return alive


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty once it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has this file, or a file in this folder, open."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(link))
                if path == target or path in target.parents:
                    return True
    return False


def below(table: dict[int, Process], roots: Iterable[int]) -> list[int]:
    """Return all descendants of these processes."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    descendants, open_ = [], list(roots)
    while open_:
        next_ = children.get(open_.pop(), [])
        descendants += next_
        open_ += next_
    return descendants


def above(table: dict[int, Process], pid: int) -> list[int]:
    """Return the ancestors of a process."""
    ancestors = []
    while pid in table and table[pid].parent:
        pid = table[pid].parent
        ancestors.append(pid)
    return ancestors


def wait_until(happens: Callable[[], bool], within: float, *, every: float = 0.05) -> bool:
    until = time.monotonic() + within
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
