"""Draw how a train batch is computed on 8 GPUs, for several ring sizes: which GPU computes which pair, and when.

    python -m bench.batch_picture --write docs/batch.png

Sizes come from the functions that derive them for a run, and micro-batches from the dealer that deals them in training.
The exit code is 1 if a ring size does not compute each pair exactly once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from bench.pictures import save
from rlexp.config.sizes import dp_size, grad_acc
from rlexp.training.dealer.deal import Dealer, Room

GPUS, BATCH, MICRO = 8, 8, 1
RINGS = (8, 4, 2, 1)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")  # one for each pair
DARK = ("#0072b2", "#009e73", "#d55e00")  # on which text is white


@dataclass(frozen=True)
class Layout:
    """How GPUs share a train batch."""

    ring: int
    replicas: int
    accumulation: int
    work: dict[tuple[int, int], tuple[int, ...]]  # the pairs of each replica in each micro-batch

    @property
    def title(self) -> str:
        return (
            f"ring {self.ring} × {counted(self.replicas, 'replica')} × "
            f"{counted(self.accumulation, 'micro-batch', 'micro-batches')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batch_picture", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args()
    layouts = [layout(ring) for ring in RINGS]
    draw(layouts, options.write)
    sys.exit("\n".join(f"ring {ring}: not every pair is computed once" for ring in wrong(layouts)) or None)


def wrong(layouts: list[Layout]) -> list[int]:
    """Return the rings with which a pair is not computed exactly once."""
    once = Counter(range(BATCH))
    return [one.ring for one in layouts if Counter(pair for pairs in one.work.values() for pair in pairs) != once]


def layout(ring: int) -> Layout:
    replicas = dp_size(GPUS, ring)
    accumulation = grad_acc(BATCH, MICRO, replicas)
    assert accumulation is not None
    pairs = [[np.full(100, place), np.full(100, place)] for place in range(BATCH)]  # of equal length
    work: dict[tuple[int, int], tuple[int, ...]] = {}
    for replica, micro_batches in enumerate(Dealer(replicas, Room(units=MICRO)).deal(pairs).packs):
        assert len(micro_batches) == accumulation
        work |= {(replica, place): pairs for place, pairs in enumerate(micro_batches)}
    return Layout(ring, replicas, accumulation, work)


def counted(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def shows(layouts: list[Layout]) -> dict[str, Any]:
    """Return the pairs of each replica in each micro-batch, by the ring."""
    shown = {}
    for one in layouts:
        of = {f"replica {replica}, micro-batch {place}": [*pairs] for (replica, place), pairs in one.work.items()}
        shown[f"ring {one.ring}"] = of
    return shown


def draw(layouts: list[Layout], path: Path) -> None:
    """Draw the layout with the most micro-batches at the left, and the others one below the other beside it."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(10, 6.6), layout="constrained")
    first, *others = layouts
    left, right = figure.subfigures(1, 2)
    panel(left.subplots(), first)
    heights = [one.accumulation + 1.3 for one in others]  # with room for the title
    for part, one in zip(right.subplots(len(others), 1, height_ratios=heights), others, strict=True):
        panel(part, one)
    figure.suptitle(
        f"One optimizer step on {GPUS} GPUs with train.batch_size={BATCH} train.micro_batch_size={MICRO}: "
        f"every ring size\ncomputes the same {BATCH} pairs. Each colour is one pair.", fontsize=12
    )  # fmt: skip
    figure.supxlabel("A ring shares both sequences of its pair: each of its GPUs computes 1/ring of the tokens.\n"
                     "The optimizer steps once, after the last micro-batch.", fontsize=10.5)  # fmt: skip
    save(figure, path, shows(layouts))


def panel(axes: Any, one: Layout) -> None:
    most = one.accumulation
    for (replica, place), pairs in one.work.items():
        for pair in pairs:
            for gpu in range(replica * one.ring, (replica + 1) * one.ring):
                axes.add_patch(rectangle((gpu, place), COLOURS[pair], "white", 0.8))
            axes.add_patch(frame((replica * one.ring, place), one.ring))
            axes.text((replica + 0.5) * one.ring, place + 0.5, f"pair {pair}" if one.ring > 1 else str(pair),
                      ha="center", va="center", fontsize=10,
                      color="white" if COLOURS[pair] in DARK else "black",
                      bbox={"facecolor": COLOURS[pair], "linewidth": 0, "pad": 1})  # fmt: skip
    axes.set(xlim=(-0.15, GPUS + 0.15), ylim=(most + 0.15, -0.15))
    axes.set_xticks([gpu + 0.5 for gpu in range(GPUS)], [str(gpu) for gpu in range(GPUS)])
    axes.set_yticks([place + 0.5 for place in range(most)], [str(place + 1) for place in range(most)])
    axes.tick_params(length=0)
    axes.set_xlabel("GPU", labelpad=1)
    axes.set_title(one.title, fontsize=11, pad=6)
    axes.set_ylabel("micro-batch")
    axes.spines[:].set_visible(False)


def rectangle(corner: tuple[float, float], colour: str, edge: str, width: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=colour, edgecolor=edge, linewidth=width, linestyle=":")


def frame(corner: tuple[float, float], ring: int) -> Any:
    """The outline of a ring's work in a micro-batch."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, ring, 1, fill=False, edgecolor="white", linewidth=3.5)


if __name__ == "__main__":
    main()
