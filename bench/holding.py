"""Draw which rank holds and computes what, for every layout of a ring of four.

    python -m bench.holding --write docs/layouts.png

The picture is drawn from the layouts' own code. The exit code is 1 if a visible pair of query and key is not computed
exactly once, or a masked pair is computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

from bench.pictures import save
from rlexp.training.ring.kernels.base import segments
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.ring.layouts.ringwise import Ringwise
from rlexp.training.ring.layouts.ulysses import Ulysses
from rlexp.training.ring.slices import slices_of
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

RING, TOKENS, HEADS, INNER = 4, 32, 8, 2
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
TITLES = {
    "zigzag": "zigzag: an early and a late part on each rank",
    "contiguous": "contiguous: one part on each rank, uneven work",
    "allgather": "allgather: the other ranks' keys in one step",
    "ulysses": "ulysses: each rank computes some heads",
    "hybrid": f"hybrid (ulysses_size={INNER}): two rings of two ranks",
}
SEGMENTS = (Segment(0, TOKENS, TOKENS),)


@dataclass(frozen=True)
class Computed:
    """Positions of queries and keys, and the ring's step that computes them; 1 if keys come from all ranks at once."""

    queries: Tensor
    keys: Tensor
    causal: bool
    step: int


@dataclass(frozen=True)
class Panel:
    """For some heads: the rank and the step that compute each pair of query and key; −1 for none."""

    heads: str
    ranks: np.ndarray
    steps: np.ndarray
    times: np.ndarray  # how often each pair is computed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.holding", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args()
    panels = panels_of_all()
    draw(panels, options.write)
    sys.exit("\n".join(f"{each}: not every pair is computed once" for each in wrong(panels)) or None)


def panels_of_all() -> dict[str, list[Panel]]:
    return {name: panels_of(get_layout(name, INNER if name == "hybrid" else RING)) for name in TITLES}


def wrong(panels: dict[str, list[Panel]]) -> list[str]:
    """Return the panels in which a pair of a query and a key before it is not computed exactly once."""
    seen = np.tril(np.ones((TOKENS, TOKENS), dtype=int))
    return [f"{name}, heads {p.heads}" for name, parts in panels.items() for p in parts if (p.times != seen).any()]


def panels_of(layout: Layout) -> list[Panel]:
    """One panel for each group of ranks that compute the same heads."""
    if isinstance(layout, Ringwise):
        return [panel(f"0 – {HEADS - 1}", {rank: [*computed(layout, rank, RING)] for rank in range(RING)})]
    assert isinstance(layout, Ulysses)
    inner = layout.shared(RING)
    panels = []
    for place in range(inner):
        mine = range(HEADS // inner * place, HEADS // inner * (place + 1))
        ranks = range(place, RING, inner)
        blocks = {rank: [*computed(layout.around, at, RING // inner)] for at, rank in enumerate(ranks)}
        panels.append(panel(f"{mine[0]} – {mine[-1]}", blocks))
    return panels


def computed(layout: Ringwise, rank: int, ring_size: int) -> Iterator[Computed]:
    """Yield the segments of each call that a rank makes."""
    placement = layout.place(SEGMENTS, ring_size)
    ring, places = Ring(rank, tuple(range(ring_size))), torch.cat(placement.places)
    _, steps = layout.way(slices_of(SEGMENTS), placement, ring)
    for step, (calls, _) in enumerate(steps):
        for call in calls:
            of_rank, of_ring = placement.places[rank][call.queries.index], places[call.keys.index]
            for at, keys, seen in segments(call):
                yield Computed(of_rank[at], of_ring[keys], seen == (0, None), step)


def panel(heads: str, blocks: dict[int, list[Computed]]) -> Panel:
    ranks, steps = (np.full((TOKENS, TOKENS), -1) for _ in range(2))
    times = np.zeros((TOKENS, TOKENS), dtype=int)
    for rank, computed_here in blocks.items():
        for each in computed_here:
            mask = torch.ones(len(each.queries), len(each.keys), dtype=torch.bool)
            rows, columns = (mask.tril() if each.causal else mask).nonzero().unbind(1)
            at = (each.queries[rows].numpy(), each.keys[columns].numpy())
            ranks[at], steps[at] = rank, each.step
            np.add.at(times, at, 1)
    return Panel(heads, ranks, steps, times)


# ---- the picture ----


def shows(panels: dict[str, list[Panel]]) -> dict[str, Any]:
    """Return who computes each pair of a query and a key, and in which step: a text of digits for each query."""
    return {f"{name}, heads {each.heads}": [["".join(map(_digit, row)) for row in values.tolist()]
                                            for values in (each.ranks, each.steps)]
            for name, parts in panels.items() for each in parts}  # fmt: skip


def _digit(value: int) -> str:
    return "." if value < 0 else str(value)


def draw(panels: dict[str, list[Panel]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12, 8.2), layout="constrained")
    parts = figure.subfigures(2, 3).ravel()
    for part, (name, shown) in zip(parts, panels.items(), strict=False):
        part.suptitle(TITLES[name], fontsize=11)
        grid = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[len(shown)]
        axes = part.subplots(*grid, squeeze=False).ravel()
        held = get_layout(name, INNER if name == "hybrid" else RING).place(SEGMENTS, RING).places
        for each, one in zip(axes, shown, strict=True):
            draw_panel(each, one, held, alone=len(shown) == 1)
    explain(parts[-1].subplots())
    save(figure, path, shows(panels), dpi=130)


def draw_panel(axes: Any, shown: Panel, held: tuple[Tensor, ...], *, alone: bool) -> None:
    image = np.ones((TOKENS, TOKENS, 3))
    for rank, colour in enumerate(COLOURS):
        base = np.array(matplotlib.colors.to_rgb(colour))
        for step in range(RING):
            paler = 0.22 * step
            image[(shown.ranks == rank) & (shown.steps == step)] = base * (1 - paler) + paler
    axes.imshow(image, extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
    for rank, places in enumerate(held):
        for place in places.tolist():
            axes.add_patch(rectangle((-3.2, place), 2.4, 1, COLOURS[rank]))
            axes.add_patch(rectangle((place, -3.2), 1, 2.4, COLOURS[rank]))
    if (shown.steps > 0).any():  # else all is computed at once
        for step, row, column in steps_to_name(shown):
            axes.text(column, row, str(step), ha="center", va="center", fontsize=10 if alone else 8, color="black")
    axes.set(xlim=(-3.4, TOKENS), ylim=(TOKENS, -3.4), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set(xlabel="keys", ylabel="queries")
    if not alone:
        axes.set_title(f"heads {shown.heads}", fontsize=9)


def rectangle(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, color=colour, linewidth=0)


def steps_to_name(shown: Panel) -> Iterator[tuple[int, float, float]]:
    """The step and the middle of each square of one chunk's queries and keys."""
    size = TOKENS // (2 * RING)
    for row in range(0, TOKENS, size):
        for column in range(0, row + 1, size):
            off = size / 6 if row == column else 0  # into the half that is seen
            yield int(shown.steps[row + size - 1, column]), row + size / 2 + off, column + size / 2 - off


def explain(axes: Any) -> None:
    axes.axis("off")
    for rank, colour in enumerate(COLOURS):
        axes.add_patch(rectangle((0.02, 0.86 - 0.08 * rank), 0.07, 0.05, colour))
        axes.text(0.12, 0.885 - 0.08 * rank, f"rank {rank}", va="center", fontsize=10)
    text = (
        "Bars at the edges: the rank that holds the token.\nColour of a field: the rank that computes it.\n\n"
        "Number in a field: the step in which it is computed.\nStep 0 needs the rank's own keys only. Later steps\n"
        "are paler.\n\n"
        "In each step, all ranks wait for the slowest one.\nWith zigzag, all ranks have equal work."
    )
    axes.text(0.02, 0.52, text, va="top", fontsize=10)
    axes.set(xlim=(0, 1), ylim=(0, 1))


if __name__ == "__main__":
    main()
