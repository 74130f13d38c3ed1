"""The door to the library ring-flash-attn, past its adapter for transformers.

The library's package imports that adapter, which asks transformers for `is_flash_attn_greater_or_equal_2_10`, a name
that transformers 5 no longer has: so `import ring_flash_attn` fails up to 0.1.8, the newest there is
(github.com/zhuzilin/ring-flash-attention/pull/88). Its functions need nothing of the adapter. Here the package is made
without being run, and the modules of the functions are imported from it as they are.

When a version with that repaired is out, ask for it in pyproject.toml, and let `functions` import from the package.
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
    """Those of the library that are used here, and flash-attn's own for a ring of one, that sends nothing."""

    zigzag: Callable[..., Any]
    llama3: Callable[..., Any]
    llama3_plan: Callable[..., Any]
    alone: Callable[..., Any]


@functools.cache
def functions() -> Functions:
    """That both packages are there was checked before a process started (`rlexp/config/backend.py`)."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    zigzag = importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn_varlen")
    llama3 = importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")
    flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    return Functions(
        zigzag.zigzag_ring_flash_attn_varlen_func,
        llama3.llama3_flash_attn_varlen_func,
        llama3.llama3_flash_attn_prepare_cu_seqlens,
        flash_attn.flash_attn_varlen_func,
    )
