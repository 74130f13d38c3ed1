"""How much memory a machine has, and what a cgroup leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlexp.base.host_memory import HostMemory, host_memory

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"}
V1 = "9:cpu:/job\n4:memory:/slurm/job\n0::/\n"
UNLIMITED = 9223372036854771712


def group(folder: str, limit: object, used: int, cached: int, *, version: int) -> dict[str, str]:
    names = [("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             ("memory.max", "memory.current", "inactive_file")][version - 1]  # fmt: skip
    top = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    values = (str(limit), str(used), f"anon 1\n{names[2]} {cached}\n")
    return dict(zip((f"{top}/{folder}{name}" for name in (*names[:2], "memory.stat")), values, strict=True))


CASES = {
    "no cgroup": ({}, HostMemory(64 * GIB, 48 * GIB)),
    "v1, of Slurm: the page cache counts as free": (
        {"proc/self/cgroup": V1, **group("slurm/job/", 16 * GIB, 9 * GIB, 3 * GIB, version=1)},
        HostMemory(16 * GIB, 10 * GIB),
    ),
    "v1, limited above the job": (
        {"proc/self/cgroup": V1, **group("slurm/job/", UNLIMITED, GIB, 0, version=1),
         **group("slurm/", 32 * GIB, 8 * GIB, 0, version=1)},
        HostMemory(32 * GIB, 24 * GIB),
    ),
    "v1 that limits nothing": (
        {"proc/self/cgroup": V1, **group("slurm/job/", UNLIMITED, GIB, 0, version=1)},
        HostMemory(64 * GIB, 48 * GIB),
    ),
    "v2": (
        {"proc/self/cgroup": "0::/user/job\n", **group("user/job/", "max", GIB, 0, version=2),
         **group("user/", 8 * GIB, 6 * GIB, GIB, version=2)},
        HostMemory(8 * GIB, 3 * GIB),
    ),
    "v2 in a container, which sees its own group at the top": (
        {"proc/self/cgroup": "0::/kubepods/pod1\n", **group("", 4 * GIB, GIB, 0, version=2)},
        HostMemory(4 * GIB, 3 * GIB),
    ),
    "a group that holds more than its limit": (
        {"proc/self/cgroup": "0::/job\n", **group("job/", GIB, 2 * GIB, 0, version=2)},
        HostMemory(GIB, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_counts(case: str, tmp_path: Path) -> None:
    files, expected = CASES[case]
    for name, text in {**MACHINE, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert host_memory(tmp_path) == expected


def test_without_proc_it_cannot_be_told(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


def test_this_machine_has_some() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.available <= memory.total
