"""Cadences and lengths of time: `50` steps, `10m`, `4h`."""

from __future__ import annotations

import re

from rlexp.base.errors import ConfigError

BEFORE_END = 30  # seconds between the end of launch.grace_seconds and the end of a cluster's job
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(key: str, value: str) -> float:
    """Convert `"90m"`, `"4h"` or `"2d"` to seconds."""
    time = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", str(value).strip())
    if not time or float(time[1]) == 0:
        raise ConfigError(f"{key}={value}: must be a time greater than 0 with its unit. For example: {key}=90m.")
    return float(time[1]) * _UNITS[time[2]]


def save_cadence(value: str | None) -> tuple[int | None, float | None]:
    """Return (steps, None) for `50`, (None, seconds) for `"10m"`, and (None, None) for null."""
    if value is None:
        return None, None
    cadence = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", str(value).strip())
    if not cadence or float(cadence[1]) == 0 or (not cadence[2] and not cadence[1].isdecimal()):
        raise ConfigError(
            f"checkpoint.save_every={value}: must be a number of steps (50), or a time with its unit (30s, 10m, 2h), "
            f"greater than 0. Use null to save at the end only."
        )
    return (None, float(cadence[1]) * _UNITS[cadence[2]]) if cadence[2] else (int(cadence[1]), None)
