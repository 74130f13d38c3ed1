"""Draw `curves.png`: the loss of all runs, and below it each run's difference to its baseline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from rlexp.base import files
from rlexp.compare.divergence import between, floor_of
from rlexp.compare.families import Families
from rlexp.compare.runs import LoggedRun
from rlexp.run_files.curve_distance import SCORE, Column, Steps

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a6d00")
STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
METRIC = "train/loss"
LEGEND = 12  # runs that a legend has room for
POINTS = 2000  # per curve: more than the picture has pixels
EQUAL = 0.04  # the height, as a share of the axis, at which a difference of zero is marked


def draw(runs: Sequence[LoggedRun], families: Families, headline: str, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["text.parse_math"] = False  # a $ in a folder's name is a $
    runs = [run for run in runs if METRIC in run.columns]
    shown = [METRIC, *([SCORE] if any(SCORE in run.columns for run in runs) else [])]
    figure, (*overlays, below) = plt.subplots(
        len(shown) + 1, 1, figsize=(9, 2.6 + 3.8 * len(shown)), sharex=True, layout="constrained",
        height_ratios=(*[3] * len(shown), 2),
    )  # fmt: skip
    for axes, metric in zip(overlays, shown, strict=True):
        axes.set_ylabel(metric)
        for place, run in enumerate(runs):
            width = max(0.8, 4.5 - 1.1 * place) if len(runs) <= LEGEND else 0.9
            axes.plot(*curve(run.steps, run.column(metric)), **look(place, width), label=run.label)
    smallest = [1.0]
    for family in families.families:
        for run in (run for run in family.others() if run in runs):
            gap = between(run, family.baseline, METRIC)
            place = runs.index(run)
            style = look(place, 1.2) | {"marker": "." if len(gap.steps) <= 200 else ""}
            below.plot(*curve(gap.steps, np.where(gap.relative > 0, gap.relative, np.nan)), **style)
            smallest.append(gap.relative[gap.relative > 0].min(initial=1.0))
            equal = curve(gap.steps, np.where(gap.relative > 0, np.nan, EQUAL))
            below.plot(*equal, "o", color=style["color"], markersize=2.5, transform=below.get_xaxis_transform())
    draw_floor(families, below, runs)
    below.set_ylabel("difference to the baseline")
    below.set_yscale("log")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")  # matplotlib's own labels are formulas
    below.set_ylim(bottom=min(smallest) / 30)  # room for differences of zero
    below.annotate("0: equal to the bit", (0.01, 0.075), xycoords="axes fraction", fontsize=7, color="#666666")
    below.set_xlabel("optimizer step")
    for axes in (*overlays, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if runs and len(runs) <= LEGEND:
        overlays[0].legend(frameon=False, fontsize=9)
    figure.suptitle(headline, fontsize=10, wrap=True)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def draw_floor(families: Families, axes: Any, runs: Sequence[LoggedRun]) -> None:
    """Draw the noise floor of the first family that is compared. Other families have a similar floor."""
    for family in families.families:
        if family.others() and METRIC in family.baseline.columns:
            steps = family.baseline.steps
            floor = floor_of(family, METRIC, steps)
            axes.fill_between(steps, 0.0, floor.values, color="#888888", alpha=0.18, linewidth=0)
            what = "noise floor, measured" if floor.measured.any() else "noise floor, estimated"
            axes.annotate(what, (0.995, 0.03), xycoords="axes fraction", ha="right", fontsize=8, color="#666666")
            return
    if len(runs) > 1:
        axes.annotate("no two of these runs are one experiment", (0.5, 0.5), xycoords="axes fraction", ha="center")


def look(place: int, width: float) -> dict[str, Any]:
    line = STYLES[place % len(STYLES)] if place else "-"
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": line, "linewidth": width}


def curve(steps: Steps, values: Column) -> tuple[Steps, Column]:
    """Return the points to draw: where there is a value; for a long curve, the lowest and highest of each stretch."""
    present = ~np.isnan(values)
    steps, values = steps[present], values[present]
    if len(steps) <= POINTS:
        return steps, values
    bounds = np.linspace(0, len(steps), POINTS // 2 + 1).astype(int)
    pairs = [(a + values[a:b].argmin(), a + values[a:b].argmax()) for a, b in itertools.pairwise(bounds)]
    kept = np.unique(np.array(pairs).ravel())
    return steps[kept], values[kept]
