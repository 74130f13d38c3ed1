"""Layouts: which tokens of a segment a rank holds, and what of another rank's they attend to. One file each."""

from __future__ import annotations

from rlexp.config.schema import LayoutName
from rlexp.ring.layouts.base import ALL, EARLY, LATE, Block, Layout, Part
from rlexp.ring.layouts.zigzag import Zigzag

__all__ = ["ALL", "EARLY", "LATE", "Block", "Layout", "Part", "get_layout"]


def get_layout(name: LayoutName) -> Layout:
    match name:
        case LayoutName.zigzag:
            return Zigzag()
