"""Held-out values by the length of sequences, as rows and evaluations have them: `eval/512-2048/accuracy`."""

from __future__ import annotations

import re
from collections.abc import Mapping

OF_LENGTH = re.compile(r"eval/(\d+-\d+|\d+\+)/(\w+)")


def by_length(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the values of each part by the part's name, the shortest sequences first."""
    parts: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        if (match := OF_LENGTH.fullmatch(name)) is not None:
            parts.setdefault(match[1], {})[match[2]] = value
    return dict(sorted(parts.items(), key=lambda part: int(re.split(r"[-+]", part[0])[0])))
