"""What a run's evaluations say: in one line the values that people know, and values by the length of sequences."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# metric of an evaluation → its short name and its format
SHOWN = {
    "eval/loss": ("loss", "{:.4f}"),
    "eval/rewards/accuracies": ("acc", "{:.2f}"),
    "eval/objective/scores": ("score", "{:.3f}"),
}
OF_LENGTH = re.compile(r"eval/(\d+-\d+|\d+\+)/(\w+)")  # as in eval/512-2048/accuracy


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row's evaluation that are shown; none if it has no evaluation."""
    given = {name: row[name] for name in SHOWN if type(row.get(name)) in (int, float)}
    return {name: float(value) for name, value in given.items() if abs(value) <= sys.float_info.max}


def in_words(row: Mapping[str, Any]) -> str:
    """Return `loss 0.6012  acc 0.66`; empty if the row has no evaluation."""
    return "  ".join(f"{SHOWN[name][0]} {SHOWN[name][1].format(value)}" for name, value in values_of(row).items())


def last(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last row with an evaluation; an empty one where there was none."""
    return next((row for row in reversed([*rows]) if values_of(row)), {})


def by_length(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the values of each part by the part's name, the shortest sequences first."""
    parts: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        if (match := OF_LENGTH.fullmatch(name)) is not None:
            parts.setdefault(match[1], {})[match[2]] = value
    return dict(sorted(parts.items(), key=lambda part: int(re.split(r"[-+]", part[0])[0])))
