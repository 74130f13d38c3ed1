"""A mode that keeps float64 throughout, where transformers' norms and softmaxes would cast to float32.

After a cast to float32 in the middle of a float64 pass, two layouts that agree to 1e-16 may round to different sides,
and then differ by 6e-8 in that element. Under this mode such casts do nothing.
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
    """Return the mode for a float64 pass, and a context that does nothing for any other."""
    return StayFloat64() if dtype is torch.float64 else contextlib.nullcontext()
