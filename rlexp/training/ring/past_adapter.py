"""The library ring-flash-attn, imported without its adapter for transformers.

The library's package imports that adapter, which asks transformers for `is_flash_attn_greater_or_equal_2_10`. This name
is gone in transformers 5, so `import ring_flash_attn` fails up to 0.1.8, the newest version
(github.com/zhuzilin/ring-flash-attention/pull/88). The library's functions do not need the adapter. So the package is
made here without running its `__init__`, and its modules are imported from it unchanged.

When a version without this fault is out, require it in pyproject.toml, and let `functions` import from the package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PACKAGE = "ring_flash_attn"


@dataclass(frozen=True)
class Functions:
    """The library's functions that are used here, and flash-attn's own for a ring of one, which sends nothing."""

    zigzag: Callable[..., Any]
    llama3: Callable[..., Any]
    llama3_plan: Callable[..., Any]
    alone: Callable[..., Any]


@functools.cache
def functions() -> Functions:
    """Import them. `rlexp/config/checks/backend.py` checks before a process starts that both packages are installed."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    zigzag = importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn_varlen")
    llama3 = importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")
    flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    return Functions(
        zigzag=zigzag.zigzag_ring_flash_attn_varlen_func,
        llama3=llama3.llama3_flash_attn_varlen_func,
        llama3_plan=llama3.llama3_flash_attn_prepare_cu_seqlens,
        alone=flash_attn.flash_attn_varlen_func,
    )
