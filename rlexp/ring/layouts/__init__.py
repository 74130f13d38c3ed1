"""Layouts: which tokens of a segment a rank holds, and what of another rank's they attend to. One file each."""

from __future__ import annotations

from rlexp.ring.layout import ALL, EARLY, LATE, Block, Deal, Layout, Part
from rlexp.ring.layouts.allgather import AllGather
from rlexp.ring.layouts.contiguous import Contiguous
from rlexp.ring.layouts.hybrid import Hybrid
from rlexp.ring.layouts.ulysses import Ulysses
from rlexp.ring.layouts.zigzag import Zigzag

__all__ = ["ALL", "EARLY", "LATE", "Block", "Deal", "Layout", "Part", "get_layout"]


def get_layout(name: str, ulysses_size: int = 1) -> Layout:
    match name:
        case "zigzag":
            return Zigzag()
        case "contiguous":
            return Contiguous()
        case "allgather":
            return AllGather()
        case "ulysses":
            return Ulysses()
        case "hybrid":
            return Hybrid(ulysses_size)
    raise ValueError(f"no layout {name}")
