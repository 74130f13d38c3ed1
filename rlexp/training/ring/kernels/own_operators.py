"""Operators of torch that are ours: a kernel hidden in a function would be invisible to a rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "rlexp"
_LIBRARIES: list[torch.library.Library] = []  # an operator goes when its library does


def define(schema: str, shapes: Callable[..., Any], **kernels: Callable[..., Any]) -> None:
    """Define an operator by its schema, unless this process has it already: a module may be imported anew.

    `shapes` makes its results without their numbers; `kernels` compute them, by the name of the device (CPU, CUDA).
    """
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema)
    for device, kernel in kernels.items():
        library.impl(name, kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    _LIBRARIES.append(library)
