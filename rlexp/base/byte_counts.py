"""Numbers of bytes, in words."""

from __future__ import annotations

GIB, MIB = 1 << 30, 1 << 20


def size(count: int) -> str:
    """`76.6 GiB`, or `5.2 MiB` below one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
