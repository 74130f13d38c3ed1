"""Needs of the attention kernels for GPUs: checked before a process starts, without torch, and again on the ranks.

A GPU's generation is its major compute capability: 8 Ampere and Ada, 9 Hopper, 10 and above Blackwell.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    heads: Mapping[int, int]  # the largest head size of each generation of GPUs on which it runs, in both passes
    modules: tuple[str, ...] = ()  # one of them can be found if it is installed
    distribution: str | None = None  # looked up instead of modules
    least: str = ""  # the oldest version of the distribution that will do
    install: str = ""
    pip: str = ""  # what to give to `pip install`, if that is all; no build from source
    varies: tuple[int, ...] = ()  # generations on which its gradients cannot be bit-identical in every run
    parts: str | None = None  # a distribution of which a part can be built; its version says which (`built`)


SINCE_AMPERE, HOPPER = range(8, 100), 9
FLASH_ATTN_4 = "flash-attn-4[cu13]>=4.0.0b36"
NEEDS = {
    "torch_flash": Needs(dict.fromkeys(SINCE_AMPERE, 256)),
    "flash_attn": Needs(
        dict.fromkeys(SINCE_AMPERE, 256),
        modules=("flash_attn_2_cuda",),  # flash-attn 4 has a folder flash_attn too
        install="Install it with `pip install -e '.[flash]'` in a checkout, which builds flash-attn where there is no "
        "wheel for your torch",
        parts="flash-attn",
    ),
    "flash_attn_3": Needs(
        {HOPPER: 256},
        modules=("flash_attn_interface", "flash_attn_3"),
        install="Build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    # As `_validate_head_dims` of flash_attn/cute/interface.py has it. That asks nothing on 12, whose tiles are made for
    # heads of at most 128. On 10 and 11 it also takes heads of 256, but with no windows in the backward pass: left out.
    "flash_attn_4": Needs(
        {HOPPER: 256, 10: 128, 11: 128, 12: 128},
        distribution="flash-attn-4",  # its module lies in the folder of flash-attn 2, which a look for it would import
        least="4.0.0b36",  # its source is what these needs were read in
        install=f"Install it with `pip install '{FLASH_ATTN_4}'`",
        pip=FLASH_ATTN_4,
        varies=(12,),
    ),
}


def fits(name: str, head_size: int, generation: int | None = None) -> bool:
    """Say whether the kernel takes heads of this size on such a GPU; None: on any. Kernels that are not for GPUs alone
    take all heads."""
    if (needs := NEEDS.get(name)) is None:
        return True
    largest = max(needs.heads.values()) if generation is None else needs.heads.get(generation, 0)
    return head_size <= largest and head_size % 8 == 0


def able(generation: int | None, head_size: int | None, *, deterministic: bool = False) -> list[str]:
    """Return the kernels for GPUs, in 16 bits, that such a GPU can run with such heads; None: unknown."""
    return [
        name
        for name, needs in NEEDS.items()
        if (generation is None or generation in needs.heads)
        and (head_size is None or fits(name, head_size, generation))
        and not (deterministic and generation in needs.varies)
    ]


def installed(name: str) -> bool:
    """Say whether the kernel's package is installed, without importing it. One without a package comes with torch."""
    needs = NEEDS[name]
    if needs.distribution is not None:
        try:
            return _ordered(importlib.metadata.version(needs.distribution)) >= _ordered(needs.least)
        except importlib.metadata.PackageNotFoundError:
            return False
    return not needs.modules or any(importlib.util.find_spec(module) is not None for module in needs.modules)


def built(name: str) -> tuple[str, frozenset[int]] | None:
    """Return the installed version and its only head sizes, where a part of the package was built; None elsewhere.

    `bench.flash_attn_2` builds such a part. Its version is 2.8.3.post2+bf16.d64.d128.sm90.
    """
    distribution = NEEDS[name].parts if name in NEEDS else None
    try:
        version = importlib.metadata.version(distribution) if distribution else ""
    except importlib.metadata.PackageNotFoundError:
        return None
    sizes = re.findall(r"(?<=[.+]d)\d+(?=\.|$)", version.partition("+")[1] + version.partition("+")[2])
    return (version, frozenset(map(int, sizes))) if sizes else None


def takes(name: str, head_size: int, generation: int | None = None) -> bool:
    """Say whether the kernel takes such heads, as `fits` does, and as it was built here."""
    part = built(name)
    return fits(name, head_size, generation) and (part is None or head_size in part[1])


def _ordered(version: str) -> tuple[float, ...]:
    """Return what versions are compared by: their numbers, of which a beta's is below that of the release."""
    numbers, _, beta = version.partition("b")
    digits = re.match(r"\d+", beta)  # a developer's mark may follow
    return *(int(each) for each in re.findall(r"\d+", numbers)[:3]), int(digits[0]) if digits else math.inf
