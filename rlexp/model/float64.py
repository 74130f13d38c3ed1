"""float64 throughout: transformers' norms and softmaxes drop to float32 even in a float64 model.

Rounding to float32 in the middle of a float64 pass lets two layouts that agree to 1e-16 land on different sides of
a rounding boundary and differ by 6e-8 in that element. Under this mode such casts do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StayFloat64(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def precise(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """The mode for a float64 pass; nothing for any other."""
    return StayFloat64() if dtype is torch.float64 else contextlib.nullcontext()
