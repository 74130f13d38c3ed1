"""Percentiles and histograms of lengths."""

from __future__ import annotations

import numpy as np

from rlexp.data.facts import Lengths

PERCENTILES = (5, 25, 50, 75, 95, 99)
BARS, LEAST = 32, 12  # of a histogram, at most and about at least


def lengths_of(part: str, lengths: np.ndarray, limit: int | None = None) -> Lengths:
    """Describe lengths, of which there is at least one. A percentile is a length that occurs."""
    named = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    percentiles = {
        "min": int(lengths.min()),
        **{str(percent): int(value) for percent, value in zip(PERCENTILES, named, strict=True)},
        "max": int(lengths.max()),
    }
    edges = edges_of(percentiles)
    last = np.minimum(lengths, edges[-1] - 1)  # the last bar counts what is longer too
    bars = tuple(map(int, np.histogram(last, bins=edges)[0]))
    at_limit = None if limit is None else int(np.count_nonzero(lengths >= limit))
    return Lengths(part, len(lengths), float(lengths.mean()), percentiles, edges, bars, at_limit, limit)


def edges_of(percentiles: dict[str, int]) -> tuple[int, ...]:
    """Return round edges, up to the longest; a few that are far longer than all others do not squeeze the rest."""
    low, most, usual = percentiles["min"], percentiles["max"], percentiles["99"]
    high = most if most <= 2 * usual else usual
    widths = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    width = next(width for width in widths if (high - low) / width < BARS - 1)
    first = low // width * width
    edges = range(first, high + width + 1, width)
    missing = max(0, LEAST - len(edges))  # where all are nearly of one length, that one stands in the middle
    return tuple(range(max(0, first - missing // 2 * width), edges[-1] + (missing + 1) // 2 * width + 1, width))
