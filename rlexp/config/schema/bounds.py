"""The bounds of a number: said once, beside its field in the schema, and checked in one place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rlexp.base.errors import ConfigError

LARGEST_INT = 2**63 - 1  # of every whole number, since torch and numpy count in 64 bits
WEEK = 7 * 24 * 3600  # seconds
MANY = 1_000_000  # enough for any number of samples, ranks or GiB; divisors are found at once


@dataclass(frozen=True)
class Bounds:
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    why: str = ""  # stands behind the rule in a message

    def allow(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        """`at least 0 and less than 0.5`"""
        limits = {"at least": self.least, "greater than": self.above, "at most": self.most, "less than": self.below}
        rules = [f"{rule} {limit}" for rule, limit in limits.items() if limit is not None]
        return f"{' and '.join(rules) or 'finite'}{self.why}"


ANY_INT, ANY_FLOAT = Bounds(least=-LARGEST_INT, most=LARGEST_INT), Bounds()


def number(default: Any, **bounds: Any) -> Any:
    """A field of the schema with its bounds, given as to `Bounds`."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(**bounds)})


def check_bounds(node: Any, prefix: str = "") -> None:
    """Refuse the first number of a configuration, or of a group of it, that is out of its bounds."""
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{key}.")
        else:
            check_number(key, value, field)


def check_number(key: str, value: Any, field: dataclasses.Field[Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int):
        _refuse_unless(ANY_INT, key, value, field)
    _refuse_unless(field.metadata.get("bounds", ANY_FLOAT), key, value, field)


def _refuse_unless(bounds: Bounds, key: str, value: float, field: dataclasses.Field[Any]) -> None:
    if not bounds.allow(value):
        null = ", or null" if "None" in str(field.type) else ""
        raise ConfigError(f"{key}={value}: must be {bounds.words()}{null}. {example(key, field.default)}")


def example(key: str, default: Any) -> str:
    """The remedy where any other value would do: the key with its default."""
    value = getattr(default, "value", default)
    if isinstance(value, str | int | float) and value not in ("", "???"):
        return f"For example: {key}={as_typed(value)}."
    return f"Give it another value, or leave {key} out for its default."


def as_typed(value: Any) -> str:
    """Return a value as a command line has it, an option by its name."""
    value = getattr(value, "value", value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
