"""Cadences and lengths of time: `50` steps, `0.25 epoch`, `1/3 epoch`, `10m`, `4h`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from rlexp.base.errors import ConfigError

BEFORE_END = 30  # seconds between the end of launch.grace_seconds and the end of a cluster's job
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"


def seconds(key: str, value: str) -> float:
    """Convert `"90m"`, `"4h"` or `"2d"` to seconds."""
    time = re.fullmatch(rf"{_NUMBER}([smhd])", str(value).strip())
    if not time or float(time[1]) == 0:
        raise ConfigError(f"{key}={value}: must be a time greater than 0 with its unit. For example: {key}=90m.")
    return float(time[1]) * _UNITS[time[2]]


@dataclass(frozen=True)
class Cadence:
    """How often something is done: every so many steps, epochs or seconds, of which one is given; or never."""

    steps: int | None = None
    epochs: Fraction | None = None
    seconds: float | None = None

    def due(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether a step is the first at or after a multiple of the steps or of the share of an epoch."""
        each = self._in_steps(steps_per_epoch)
        return each is not None and step // each > (step - 1) // each

    def times(self, steps: int, steps_per_epoch: int) -> int:
        """Return how often it is due in a run of so many steps; by the clock, at most in each."""
        each = self._in_steps(steps_per_epoch)
        return steps * (self.seconds is not None) if each is None else min(steps, math.floor(steps / each))

    def in_words(self, steps_per_epoch: int) -> str:
        """`every 0.25 epoch (12 or 13 steps)`"""
        each = self._in_steps(steps_per_epoch)
        if each is None:
            return "never" if self.seconds is None else f"every {shown_time(self.seconds)}"
        if self.epochs is None:
            return f"every {plural(self.steps or 0, 'step')}"
        low, high = max(1, math.floor(each)), math.ceil(each)
        steps = plural(high, "step") if low == high else f"{low} or {plural(high, 'step')}"
        share = f"{float(self.epochs):g}" if 10**9 % self.epochs.denominator == 0 else str(self.epochs)
        return f"every {'epoch' if share == '1' else share + ' epoch' + 's' * (self.epochs > 1)} ({steps})"

    def _in_steps(self, steps_per_epoch: int) -> Fraction | None:
        if self.steps is not None:
            return Fraction(self.steps)
        return None if self.epochs is None else self.epochs * steps_per_epoch


def shown_time(length: float) -> str:
    """`30m`, `90s`"""
    unit = next(unit for unit in reversed(_UNITS) if length % _UNITS[unit] == 0 or unit == "s")
    return f"{length / _UNITS[unit]:g}{unit}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def save_cadence(value: str | None) -> Cadence:
    """Read `checkpoint.save_every`: `50`, `"0.25 epoch"` or `"10m"`."""
    cadence = _read(value)
    if cadence is None:
        raise ConfigError(
            f"checkpoint.save_every={value}: must be a number of steps (50), a share or number of epochs (0.25 epoch), "
            f"or a time with its unit (30s, 10m, 2h), greater than 0. Use null to save at the end only."
        )
    return cadence


def eval_cadence(value: float | str | None) -> Cadence:
    """Read `train.eval_every`: `50` or `"0.25 epoch"`."""
    cadence = _read(value)
    if cadence is None or cadence.seconds is not None:
        raise ConfigError(
            f"train.eval_every={value}: must be a number of steps (50), or a share or number of epochs (0.25 epoch), "
            f"greater than 0. Use null to evaluate never."
        )
    return cadence


def _read(value: float | str | None) -> Cadence | None:
    """Return None for what is no cadence."""
    if value is None:
        return Cadence()
    match = re.fullmatch(rf"{_NUMBER} ?([smhd]|epochs?)?|(\d{{1,9}}/[1-9]\d{{0,8}}) ?epochs?", str(value).strip())
    if not match or Fraction(match[1] or match[3]) == 0:
        return None
    if match[3]:
        return Cadence(epochs=Fraction(match[3]))
    count, unit = match[1], match[2]
    if unit is None:
        return Cadence(steps=int(count)) if count.isdecimal() else None
    return Cadence(seconds=float(count) * _UNITS[unit]) if unit in _UNITS else Cadence(epochs=Fraction(count))
