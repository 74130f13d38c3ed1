"""Lengths of time, in units that people use."""

from __future__ import annotations

UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float, *, fine: bool = False) -> str:
    """Return `48 s`, `3 min 05 s`, `2 h 07 min`, `5 d 03 h`; below ten seconds `3.4 s` or `34 ms`, if it is `fine`."""
    if fine and seconds < 0.995:
        return f"{seconds * 1000:.3g} ms" if seconds >= 0.0995 else f"{seconds * 1000:.2g} ms"
    if fine and seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    for size, unit, part, below in UNITS:
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {below}"
    return f"{whole} s"
