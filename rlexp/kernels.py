"""What the attention kernels for GPUs need: asked before a process starts, without torch, and again on the ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    generations: range  # of the GPU: its major compute capability
    largest_head: int = 256
    modules: tuple[str, ...] = ()  # of which one is there where it is installed
    distribution: str | None = None  # or the name that it is installed under
    install: str = ""


SINCE_AMPERE, HOPPER, BLACKWELL = range(8, 100), range(9, 10), range(10, 12)
NEEDS = {
    "torch_flash": Needs(SINCE_AMPERE),
    "flash_attn": Needs(
        SINCE_AMPERE,
        modules=("flash_attn_2_cuda",),  # a folder flash_attn is also of flash-attn 4
        install="`pip install rlexp[flash]`, which builds flash-attn where there is no wheel for your torch",
    ),
    "flash_attn_3": Needs(
        HOPPER,
        modules=("flash_attn_interface", "flash_attn_3"),
        install="Build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    "flash_attn_4": Needs(
        BLACKWELL,
        largest_head=128,
        distribution="flash-attn-4",  # to look for its module would import flash-attn 2, in whose folder it lies
        install="`pip install flash-attn-4`",
    ),
}


def fits(name: str, head_size: int) -> bool:
    """Whether the kernel takes heads of this size. Those that are not for GPUs take any."""
    needs = NEEDS.get(name)
    return needs is None or (head_size <= needs.largest_head and head_size % 8 == 0)


def installed(name: str) -> bool:
    """Found without importing it. What needs no package comes with torch."""
    needs = NEEDS[name]
    if needs.distribution is not None:
        try:
            return bool(importlib.metadata.version(needs.distribution))
        except importlib.metadata.PackageNotFoundError:
            return False
    return not needs.modules or any(importlib.util.find_spec(module) is not None for module in needs.modules)
