"""Layouts: which tokens of a segment a rank holds, and which tokens of other ranks they attend to. One file each.

`shard.py` takes what a rank holds from a pack.
"""

from __future__ import annotations

from rlexp.training.ring.base import Layout
from rlexp.training.ring.layouts.allgather import AllGather
from rlexp.training.ring.layouts.contiguous import Contiguous
from rlexp.training.ring.layouts.hybrid import Hybrid
from rlexp.training.ring.layouts.ulysses import Ulysses
from rlexp.training.ring.layouts.zigzag import Zigzag

__all__ = ["Layout", "get_layout"]


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
