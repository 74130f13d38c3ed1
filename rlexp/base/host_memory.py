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
    kib = _numbers(root / "proc/meminfo")
    if "MemTotal:" not in kib:
        return None
    total, available = 1024 * kib["MemTotal:"], 1024 * kib.get("MemAvailable:", kib["MemTotal:"])
    for folder, limit, usage, cached in _groups(root):
        most = _number(folder / limit)
        if most is not None and most < UNLIMITED:
            used = (_number(folder / usage) or 0) - _numbers(folder / "memory.stat").get(cached, 0)
            total, available = min(total, most), min(available, max(most - max(used, 0), 0))
    return HostMemory(total, available)


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


def _words(path: Path) -> list[list[str]]:
    """Return the words of each line; none of a file that cannot be read."""
    try:
        return [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []


def _number(path: Path) -> int | None:
    return next((int(word) for word, *_ in _words(path) if word.isdecimal()), None)


def _numbers(path: Path) -> dict[str, int]:
    """Return the number behind each name."""
    return {name: int(number) for name, number, *_ in (each for each in _words(path) if len(each) > 1)
            if number.isdecimal()}  # fmt: skip
