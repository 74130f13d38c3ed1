"""How often, and how long: a number of steps, or a length of time."""

from __future__ import annotations

import re

from rlexp.errors import ConfigError

BEFORE_END = 30  # seconds before a cluster ends a job that nothing of launch.grace_seconds should reach into
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(key: str, value: str) -> float:
    """`"90m"`, `"4h"` or `"2d"`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value).strip())
    if not found or float(found[1]) == 0:
        raise ConfigError(f"{key}={value}: must be a time with its unit (30s, 90m, 4h, 2d), greater than 0.")
    return float(found[1]) * _UNITS[found[2]]


def save_cadence(value: str | None) -> tuple[int | None, float | None]:
    """`50` is steps, `"10m"` is time (s, m, h); as (steps, seconds), of which one at most is given."""
    if value is None:
        return None, None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
    if not found or float(found[1]) == 0 or (not found[2] and not found[1].isdecimal()):
        raise ConfigError(
            f"checkpoint.save_every={value}: must be a number of steps (50), or a time with its unit (30s, 10m, 2h), "
            f"greater than 0; null saves at the end only."
        )
    return (None, float(found[1]) * _UNITS[found[2]]) if found[2] else (int(found[1]), None)
