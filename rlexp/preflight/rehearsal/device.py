"""A device without memory or kernels: tensors on it have shape, dtype and place, and torch treats it as an accelerator.
Its ranks send nothing.

torch lets Python define a device (`PrivateUse1`). Under `FakeTensorMode` its tensors need no kernels, and unlike fake
CUDA tensors they need no build of torch for CUDA, even in the backward pass. A tensor of the host in an operator of the
device raises, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "rehearsed"


@functools.cache
def rehearsed_device() -> torch.device:
    """Register the device, once for this process, with the two operators by which `torch.tensor(…, device=…)` copies
    from the host.

    torch turns all modes off there. What the two make becomes a fake tensor as soon as the modes are on again.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=Accelerator())
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:  # noqa: ARG001
        return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda _source, target, _non_blocking=False: target, "PrivateUse1")
    _LIBRARIES.append(library)
    return torch.device(NAME, 0)


_LIBRARIES: list[Any] = []  # a library's operators go when it does


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for a method that waits for the device or changes it: nothing ever runs there."""


class Stream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    record = wait = synchronize = _nothing
    query = Stream.query


class Accelerator:
    """What torch, FSDP and activation checkpointing ask a device's module for: `torch.rehearsed`, as `torch.cuda`."""

    Stream, Event = Stream, Event
    _only = Stream()
    set_device = synchronize = manual_seed = manual_seed_all = set_rng_state = empty_cache = _nothing

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = memory_allocated = staticmethod(lambda _device=None: 0)
    device_count = staticmethod(lambda: 1)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, _device: Any = None) -> Any:
        return self._only

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        yield stream

    device = stream


def _converted(parameter: nn.Parameter, fn: Any) -> nn.Parameter:
    with torch.no_grad():
        made = fn(parameter.data)
        if made.device.type == parameter.device.type:
            parameter.data = made
            return parameter
    moved = nn.Parameter(made, parameter.requires_grad)  # no tensor's data can change from a device's to another's
    moved.__dict__ |= parameter.__dict__ | moved.__dict__
    return moved


@contextlib.contextmanager
def replaced(holder: Any, **functions: Any) -> Iterator[None]:
    before = {name: getattr(holder, name) for name in functions}
    for name, function in functions.items():
        setattr(holder, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(holder, name, function)


@contextlib.contextmanager
def joined(rank: int, ranks: int) -> Iterator[None]:
    """Make this process a rank of a world in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = rehearsed_device().type
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group(f"cpu:fake,{name}:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


@contextlib.contextmanager
def conversions() -> Iterator[None]:
    """Let modules be cast and moved. torch swaps the contents of fake parameters, which fails if anything else knows
    them, an optimizer or another mode; here their data are set, as those of other parameters are."""

    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        modules = self.modules() if recurse else (self,)
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _converted(parameter, fn)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    with replaced(nn.Module, _apply=_apply), replaced(torch.Tensor, record_stream=lambda *_: None):
        yield
