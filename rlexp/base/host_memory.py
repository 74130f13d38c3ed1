"""The memory of this machine that a run may take: what the machine has, or less where a cgroup limits the process.

Slurm, Docker and Kubernetes limit a job by cgroups. Both versions are read, with the limits of all groups above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # bytes; cgroup v1 writes a number near 2⁶³ where it limits nothing


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine, or of the group of processes to which this one is confined."""

    total: int
    available: int  # without swapping; the page cache counts as available


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return this machine's memory; None where it cannot be told. Tests give another `root`."""
    try:
        meminfo = dict(_meminfo(root / "proc/meminfo"))
    except OSError:
        return None
    if "MemTotal" not in meminfo:
        return None
    total, available = meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo["MemTotal"])
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _meminfo(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdecimal():
            yield name, int(number[0]) * 1024


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup that confines this process, and the bytes that it uses without the page cache."""
    for folder, limit, usage, cached in _groups(root):
        most = _number(folder / limit)
        if most is None or most >= UNLIMITED:
            continue
        used = _number(folder / usage) or 0
        yield most, max(used - _in_stat(folder / "memory.stat", cached), 0)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folders of this process's cgroups up to the topmost one, and the names of their files."""
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top, files = (root / "sys/fs/cgroup", v2) if number == "0" else (root / "sys/fs/cgroup/memory", v1)
        folder = top / place.lstrip("/")
        if not folder.is_dir():  # in a container the path is the host's, and the group is mounted at the top
            folder = top
        for each in [folder, *folder.parents]:
            yield (each, *files)
            if each == top:
                break


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _in_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
