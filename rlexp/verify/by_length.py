"""Held-out values by the length of sequences, written out a second time from docs/evaluation.md.

A part has the rows whose longest sequence is longer than the bound before it, and not longer than its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlexp.verify.formula import JudgedBatch
from rlexp.verify.recording import TokenExample

ACCURACIES = ("rewards/accuracies", "mean_token_accuracy")
Z = 1.959963984540054  # standard deviations around the mean of a normal distribution that hold 95 % of it


def by_length(bounds: Sequence[int], batch: Sequence[TokenExample], judged: JudgedBatch) -> dict[str, float]:
    """Return the values of each part: its rows, its loss and its share of the denominator, and its accuracy."""
    row: dict[str, float] = {}
    lengths = [max(len(example.sequence(side)) for side in example.sides) for example in batch]
    shares = judged.weights("loss", len(batch))
    first = 0
    for bound in (*bounds, None) if bounds else ():
        name = f"{first}-{bound}" if bound is not None else f"{first}+"
        here = [place for place, length in enumerate(lengths) if first < length and (bound is None or length <= bound)]
        share = math.fsum(shares[place] for place in here)
        row |= {f"{name}/examples": len(here), f"{name}/share": share / math.fsum(shares)}
        if share:
            row[f"{name}/loss"] = math.fsum(float(judged.losses.losses_E[place]) for place in here) / share
        row |= {f"{name}/{key}": value for key, value in accuracy_of(here, judged, len(batch)).items()}
        first = bound or first
    return row


def accuracy_of(here: Sequence[int], judged: JudgedBatch, count: int) -> Mapping[str, float]:
    """Return the accuracy of some rows with its interval, where the loss has one and they have any to judge."""
    name = next((name for name in ACCURACIES if name in judged.losses.metrics_E), None)
    if name is None:
        return {}
    weights = judged.weights(name, count)
    total = math.fsum(weights[place] for place in here)
    if not total:
        return {}
    share = math.fsum(weights[place] * float(judged.losses.metrics_E[name][place]) for place in here) / total
    low, high = interval(share, total)
    return {"accuracy": share, "accuracy_low": low, "accuracy_high": high}


def interval(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson: the two shares p with (share − p)² = Z²·p·(1 − p) / count."""
    a, b, c = 1 + Z**2 / count, -(2 * share + Z**2 / count), share**2
    root = math.sqrt(max(0.0, b**2 - 4 * a * c))
    return max(0.0, (-b - root) / (2 * a)), min(1.0, (-b + root) / (2 * a))
