"""Put each parameter in its place as soon as it is loaded: on the device, in the dtype that computes.

What transformers loads is a view of a file, so no rank ever holds a model in float32 to cast it, neither on its device
nor on the host. Where the cast loses bits, a rank keeps its part of the exact values until the engine has its masters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rlexp.base.errors import ModelError
from rlexp.launch import watch

Part = Callable[[torch.Size], slice]  # of a flattened parameter
DTYPE_NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # as configurations name them
_PLACED = "_rlexp_placed"  # an attribute of a parameter that is in its place
EXACT = "_rlexp_exact"  # an attribute with a parameter's exact values, where its dtype loses bits


def loses_bits(wide: Tensor, narrow: Tensor) -> bool:
    return not torch.equal(narrow.to(wide.dtype), wide)


@dataclass(frozen=True)
class Placing:
    """Where a rank's parameters go.

    With a `part`, the rank keeps its part of the exact values: beside the parameter, on the host, if the dtype loses
    bits; or instead of it, on the device, if `whole` is False. Such a parameter has a shape but no memory. So has one
    that another rank holds for this one, if `elsewhere`.
    """

    device: torch.device
    dtype: torch.dtype
    part: Part | None = None
    whole: bool = True
    loses: Callable[[Tensor, Tensor], bool] = loses_bits
    rounded: torch.dtype | None = None  # to which all that arrives is rounded first
    elsewhere: bool = False

    def put(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta or hasattr(parameter, _PLACED) or not parameter.is_floating_point():
            return parameter
        placed = self._empty(parameter) if self.elsewhere else self._held(parameter)
        placed.__dict__ |= parameter.__dict__ | placed.__dict__  # with transformers' marks
        setattr(placed, _PLACED, True)
        return placed

    def _empty(self, parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(parameter, device="meta", dtype=self.dtype)
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def _held(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._whole(parameter) if self.whole else self._part_alone(parameter)

    def _whole(self, parameter: nn.Parameter) -> nn.Parameter:
        wide = rounded(parameter.detach().to(self.device), self.rounded)
        placed = nn.Parameter(wide.to(self.dtype), requires_grad=parameter.requires_grad)
        if self.part is not None and placed.dtype != wide.dtype and self.loses(wide, placed.detach()):
            setattr(placed, EXACT, wide.view(-1)[self.part(wide.shape)].to("cpu", copy=True))
        return placed

    def _part_alone(self, parameter: nn.Parameter) -> nn.Parameter:
        assert self.part is not None, "a rank that holds nothing"
        value = rounded(parameter.detach(), self.rounded)
        placed = self._empty(parameter)
        part = value.reshape(-1)[self.part(value.shape)]
        setattr(placed, EXACT, part.to(self.device, self.dtype, copy=True))
        return placed


def placed_copy(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy in the same place, with a copy of the exact values that are kept of it."""
    copied = nn.Parameter(torch.empty_like(parameter) if parameter.is_meta else parameter.detach().clone())
    for mark in (_PLACED, EXACT):
        if hasattr(parameter, mark):
            kept = getattr(parameter, mark)
            setattr(copied, mark, kept.clone() if isinstance(kept, Tensor) else kept)
    return copied


def rounded(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the value with the precision of another dtype, in its own dtype."""
    if dtype is None:
        return value
    narrow = value.to(dtype)
    if dtype is torch.float16 and narrow.isinf().any() and not value.isinf().any():
        raise ModelError(
            f"model.dtype=fp16: a weight is as large as {float(value.abs().max()):.3g}, and fp16 ends at 65504. Use "
            f"model.dtype=bf16, or leave it out."
        )
    return narrow.to(value.dtype)


def round_all(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters of a module where they are, also a rank's pieces of them under ZeRO-3."""
    for parameter in model.parameters():
        for held in (parameter, getattr(parameter, "ds_tensor", None)):
            if held is not None and held.is_floating_point():
                held.data = rounded(held.data, dtype)


def take_exact(parameter: nn.Parameter) -> Tensor | None:
    """Return the exact values that were kept, and let them go; None if none were."""
    return parameter.__dict__.pop(EXACT, None)


def evenly(rank: int, ranks: int, shape: torch.Size) -> slice:
    """Cut a flattened parameter into equal parts; the last ones may be short."""
    size = -(-shape.numel() // ranks)
    return slice(rank * size, (rank + 1) * size)


def by_rows(rank: int, ranks: int, shape: torch.Size) -> slice:
    """Cut a parameter along its first dimension, as FSDP does."""
    size = -(-shape[0] // ranks) * math.prod(shape[1:])
    return slice(rank * size, (rank + 1) * size)


def gathered(part: Tensor, numel: int, device: torch.device) -> Tensor:
    """Join the parts that `evenly` cut, on every rank. A collective call."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    size = -(-numel // ranks)
    padded = torch.zeros(size, dtype=part.dtype, device=device)
    padded[: part.numel()] = part
    if ranks == 1:
        return padded
    whole = torch.empty(size * ranks, dtype=part.dtype, device=device)
    dist.all_gather_into_tensor(whole, padded)
    return whole[:numel]


@contextlib.contextmanager
def arriving(placing: Placing | None) -> Iterator[None]:
    """Put each parameter in its place when a module gets it."""
    if placing is None:
        yield
        return

    def put(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        return None if parameter is None else placing.put(parameter)

    with register_module_parameter_registration_hook(put):
        yield


def put_all(model: nn.Module, placing: Placing) -> None:
    """Put the parameters of a module in their places, one by one, where they are not there yet; tied ones stay tied.
    Buffers, such as rotary tables, keep their dtype."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            watch.note()
            if id(parameter) not in placed:
                placed[id(parameter)] = placing.put(parameter)
            module.register_parameter(name, placed[id(parameter)])
    put_buffers(model, placing.device)


def put_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
