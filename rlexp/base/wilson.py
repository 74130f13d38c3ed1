"""The interval of a share that was counted."""

from __future__ import annotations

import math

Z = 1.959963984540054  # of a normal distribution, 95 % lie within so many standard deviations


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` (E. B. Wilson, Probable inference, JASA 22, 1927)."""
    if not count:
        return 0.0, 1.0
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
