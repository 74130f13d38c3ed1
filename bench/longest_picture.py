"""Draw the longest pair that fits by ring size, from the table that `bench.gpu --predict` wrote.

    python -m bench.longest_picture --write docs/longest.png

For each engine there are two lines: checkpointing alone, and the memory options that fit the longest pair. An adapter
is another training, and is left out.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from bench.kept_rows import filled, table_under

TABLE = Path(__file__).resolve().parent.parent / "docs" / "measured" / "gpu.md"
HEADING = "the-longest-pair-by-ring-size"
COLOURS = {"zero1": "#0072b2", "zero2": "#56b4e9", "zero3": "#009e73", "fsdp2": "#d55e00"}
ALONE = "checkpointing"
APART = 0.052  # of the picture's height: the least distance of two labels


@dataclass(frozen=True)
class Line:
    engine: str
    memory: str
    rings: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.engine}, {self.memory}: {self.tokens[-1]:,}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.longest_picture", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    parser.add_argument("--table", type=Path, default=TABLE, help="the page with the table")
    options = parser.parse_args()
    lines = chosen(read(options.table))
    if not lines:
        raise SystemExit(f"{options.table}: no engine has a length for every ring yet. Run `make predict` to the end.")
    draw(lines, options.write)
    for line in lines:
        print(f"{options.write}: {line.label}")


def read(page: Path) -> list[Line]:
    """Return the rows in which every ring fits a pair."""
    head, _, *rows = filled(table_under(page, HEADING))
    places = [place for place, name in enumerate(head) if name.startswith("ring ")]
    rings = tuple(int(head[place].removeprefix("ring ")) for place in places)
    lines = []
    for row in rows:
        cells = [row[place].replace(",", "") for place in places]
        if all(cell.isdecimal() for cell in cells):
            lines.append(Line(row[0].strip("`"), row[1], rings, tuple(map(int, cells))))
    return lines


def chosen(lines: list[Line]) -> list[Line]:
    """Return each engine's line of checkpointing alone and its longest line, from the longest pair to the shortest."""
    kept = []
    for _, group in itertools.groupby(lines, lambda line: line.engine):
        own = [line for line in group if "LoRA" not in line.memory]
        if not own:
            continue
        longest = max(own, key=lambda line: line.tokens[-1])
        kept += [line for line in own if line is longest or line.memory == ALONE]
    return sorted(kept, key=lambda line: -line.tokens[-1])


def draw(lines: list[Line], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    rings = lines[0].rings
    figure, axes = plt.subplots(figsize=(11, 5.2), layout="constrained")
    for line in lines:
        offloaded = "offload" in line.memory
        axes.plot(rings, line.tokens, "--" if offloaded else "-", color=COLOURS[line.engine], marker="o",
                  markersize=4.5, linewidth=1.8)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(rings[0] * 0.93, rings[-1] * 1.02))
    axes.set_xticks(rings, [str(ring) for ring in rings])
    axes.xaxis.set_minor_locator(plt.NullLocator())
    ticks = [2**power for power in range(10, 20)]
    axes.set_yticks(ticks)
    axes.yaxis.set_minor_locator(plt.NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set(xlabel="ring size, of 8 GPUs", ylabel="tokens of the longest sequence")
    axes.set_title(
        "The longest DPO pair that fits: Llama 8B on 8 × 80 GB\n"
        "predicted, not measured; the numbers are those of the longest ring",
        fontsize=12,
        loc="left",
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, lines)
    figure.savefig(path, dpi=120)


def label(axes: Any, lines: list[Line]) -> None:
    """Write each line's options and longest pair at its right end, with room between two labels."""
    low, high = np.log(axes.get_ylim())
    ends = [(np.log(line.tokens[-1]) - low) / (high - low) for line in lines]
    places = list(ends)
    for _ in range(200):  # two labels that are too close push each other away
        for upper in range(len(places) - 1):
            missing = APART - (places[upper] - places[upper + 1])
            if missing > 0:
                places[upper] += missing / 2
                places[upper + 1] -= missing / 2
    for line, end, place in zip(lines, ends, places, strict=True):
        axes.annotate(
            line.label, (1.005, end), (1.06, place), xycoords="axes fraction", textcoords="axes fraction",
            color=COLOURS[line.engine], fontsize=9.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": COLOURS[line.engine], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


if __name__ == "__main__":
    main()
