"""Draw the longest pair that fits by ring size, from the table that `bench.gpu --predict` wrote.

    python -m bench.longest_picture --write docs/longest.png

Each engine has up to three rows: checkpointing alone, the memory options that fit the longest pair, and an adapter
(LoRA). Engines that fit the same pairs by the same options share a row.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

from bench.kept_rows import filled, table_under
from bench.pictures import save

TABLE = Path(__file__).resolve().parent.parent / "docs" / "measured" / "gpu.md"
HEADING = "the-longest-pair-by-ring-size"
COLOURS = {1: "#bdd7ee", 2: "#6baed6", 4: "#2171b5", 8: "#08306b"}  # of a ring
ALONE, ADAPTER = "checkpointing", "LoRA"


@dataclass(frozen=True)
class Line:
    engine: str
    memory: str
    rings: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.engine}: {self.memory}"


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
        print(f"{options.write}: {line.label}: {line.tokens[-1]:,}")


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
    """Return each engine's lines of checkpointing alone, of its longest pair and of its adapter; the longest first."""
    kept: dict[tuple[str, tuple[int, ...]], Line] = {}
    for _, group in itertools.groupby(lines, lambda line: line.engine):
        every = [*group]
        own = [line for line in every if ADAPTER not in line.memory]
        longest = max(own, key=lambda line: line.tokens[-1], default=None)
        for line in every:
            if line is longest or line.memory == ALONE or ADAPTER in line.memory:
                same = kept.get((line.memory, line.tokens))
                engine = line.engine if same is None else f"{same.engine}, {line.engine}"
                kept[line.memory, line.tokens] = Line(engine, line.memory, line.rings, line.tokens)
    return sorted(kept.values(), key=lambda line: -line.tokens[-1])


def shows(lines: list[Line]) -> list[dict[str, Any]]:
    return [{name: [*value] if isinstance(value, tuple) else value for name, value in asdict(line).items()}
            for line in lines]  # fmt: skip


def draw(lines: list[Line], path: Path) -> None:
    """One row for each line, with a dot for each ring."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(11, 0.42 * len(lines) + 1.8), layout="constrained")
    for place, line in enumerate(lines):
        axes.plot(line.tokens, [place] * len(line.tokens), color="#bbbbbb", linewidth=1.2, zorder=1)
        axes.text(line.tokens[-1] * 1.12, place, f"{line.tokens[-1]:,}", va="center", fontsize=9.5)
    for number, ring in enumerate(rings := lines[0].rings):
        tokens = [line.tokens[number] for line in lines]
        said = f"ring of {ring}{', with its number of tokens' * (ring == rings[-1])}"
        axes.scatter(tokens, range(len(lines)), s=52, color=COLOURS[ring], zorder=2, label=said)
    axes.set(xscale="log", ylim=(len(lines) - 0.5, -0.5), xlim=(800, 2_000_000))
    axes.set_yticks(range(len(lines)), [line.label for line in lines])
    ticks = [2**power for power in range(10, 21, 2)]
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(plt.NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("tokens of the longest sequence")
    axes.set_title("The longest DPO pair that fits: Llama 8B on 8 GPUs of 80 GB (predicted, not measured)", fontsize=12,
                   loc="right")  # fmt: skip
    axes.grid(alpha=0.25, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
    save(figure, path, shows(lines))


if __name__ == "__main__":
    main()
