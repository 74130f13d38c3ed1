"""Needs of the attention kernels for GPUs: checked before a process starts, without torch, and again on the ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    generations: range  # major compute capabilities of the GPUs on which it runs
    largest_head: int = 256
    modules: tuple[str, ...] = ()  # one of them can be found if it is installed
    distribution: str | None = None  # looked up instead of modules
    install: str = ""


SINCE_AMPERE, HOPPER, BLACKWELL = range(8, 100), range(9, 10), range(10, 12)
NEEDS = {
    "torch_flash": Needs(SINCE_AMPERE),
    "flash_attn": Needs(
        SINCE_AMPERE,
        modules=("flash_attn_2_cuda",),  # flash-attn 4 has a folder flash_attn too
        install="Install it with `pip install -e '.[flash]'` in a checkout, which builds flash-attn where there is no "
        "wheel for your torch",
    ),
    "flash_attn_3": Needs(
        HOPPER,
        modules=("flash_attn_interface", "flash_attn_3"),
        install="Build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    "flash_attn_4": Needs(
        BLACKWELL,
        largest_head=128,
        distribution="flash-attn-4",  # its module lies in the folder of flash-attn 2, which a look for it would import
        install="Install it with `pip install flash-attn-4`",
    ),
}


def fits(name: str, head_size: int) -> bool:
    """Say whether the kernel takes heads of this size. Kernels that are not for GPUs alone take any."""
    needs = NEEDS.get(name)
    return needs is None or (head_size <= needs.largest_head and head_size % 8 == 0)


def installed(name: str) -> bool:
    """Say whether the kernel's package is installed, without importing it. One without a package comes with torch."""
    needs = NEEDS[name]
    if needs.distribution is not None:
        try:
            return bool(importlib.metadata.version(needs.distribution))
        except importlib.metadata.PackageNotFoundError:
            return False
    return not needs.modules or any(importlib.util.find_spec(module) is not None for module in needs.modules)
