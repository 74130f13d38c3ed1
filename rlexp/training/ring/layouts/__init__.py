"""Layouts: a placement says which rank holds which tokens, and a transport how they reach the ranks that see them."""

from __future__ import annotations

from dataclasses import replace

from rlexp.training.ring.base import Layout
from rlexp.training.ring.layouts.ringwise import Ringwise, Way
from rlexp.training.ring.layouts.ulysses import Ulysses
from rlexp.training.ring.placement import contiguous, zigzag
from rlexp.training.ring.transports.gather import gathered
from rlexp.training.ring.transports.travel import direct, neighbour
from rlexp.training.ring.widths import Costs

__all__ = ["Layout", "get_layout"]

TRAVEL: dict[str, Way] = {"direct": direct, "neighbour": neighbour}


def get_layout(
    name: str, ulysses_size: int | None = 1, transport: str = "direct", costs: Costs | None = None
) -> Layout:
    """Return a layout. With `costs`, zigzag and allgather give each tree a width; the others cut all alike."""
    around = Ringwise("zigzag", zigzag, TRAVEL[transport], of_windows=direct)  # few see a row, and some of them are far
    match name:
        case "zigzag":
            return replace(around, costs=costs)
        case "contiguous":
            return Ringwise("contiguous", contiguous, TRAVEL[transport], of_windows=direct)
        case "allgather":
            return Ringwise("allgather", zigzag, gathered, costs=costs)
        case "ulysses":
            return Ulysses("ulysses", around)
        case "hybrid":
            return Ulysses("hybrid", around, ulysses_size)
    raise ValueError(f"no layout {name}")
