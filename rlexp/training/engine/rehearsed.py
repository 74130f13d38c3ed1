"""DeepSpeed in a rehearsal: a device that it takes for a GPU, and checks that pass without numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _always(answer: Any) -> Callable[..., Any]:
    """Return a method that answers the same, whatever it is asked."""

    def method(*_: Any, **__: Any) -> Any:
        return answer

    return method


class AsGPU:
    """What DeepSpeed's accelerator for CPUs says otherwise on a GPU: memory of its own, streams, no waiting host."""

    on: torch.device
    current_device = memory_allocated = _always(0)
    set_device = synchronize = _always(None)
    is_synchronized_device = resolves_data_dependency = _always(False)
    is_pinned = _always(True)
    communication_backend_name = _always("fake")

    def device_name(self, device_index: int | None = None) -> str:
        return self.on.type if device_index is None else f"{self.on.type}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:  # noqa: ARG002
        return self.on

    def current_device_name(self) -> str:
        return f"{self.on.type}:0"

    def Stream(self, *_args: Any, **_kwargs: Any) -> Any:  # noqa: N802
        return torch.get_device_module(self.on).Stream()

    def stream(self, stream: Any) -> Any:
        return torch.get_device_module(self.on).stream(stream)

    def current_stream(self, _device: Any = None) -> Any:
        return torch.get_device_module(self.on).current_stream()

    default_stream = current_stream

    @property
    def Event(self) -> Any:  # noqa: N802
        return torch.get_device_module(self.on).Event

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.on.type

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:  # noqa: ARG002
        return tensor


def install(device: torch.device) -> None:
    """Let DeepSpeed compute on this device, whose module stands in for `torch.cuda`, in this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class RehearsedAccelerator(AsGPU, CPU_Accelerator):
        on = device

    real_accelerator.set_accelerator(RehearsedAccelerator())


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Let DeepSpeed's checks pass, that all ranks do the same and that the gradient is finite: there are no others, and
    no numbers. Each check still runs, so that its operators are counted."""
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2, utils

    stage12 = stage_1_and_2.DeepSpeedZeroOptimizer
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (utils, "assert_lst_len_same_as_other_ranks", passing),
        (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", passing),
        *((module, "is_invalid_grad_norm", passing) for module in (stage3, stage_1_and_2)),
        (stage12, "update_offload_overflow_tracker", without_overflow),
    ]
    with contextlib.ExitStack() as undoing:
        for holder, name, change in changes:
            if hasattr(holder, name):
                check = getattr(holder, name)
                undoing.callback(setattr, holder, name, check)
                setattr(holder, name, change(check))
        yield


def passing(check: Callable[..., Any]) -> Callable[..., bool]:
    def passed(*args: Any) -> bool:
        with contextlib.suppress(RuntimeError):
            check(*args)
        return False

    return passed


def without_overflow(track: Callable[..., None]) -> Callable[..., None]:
    def tracked(optimizer: Any, grad: Any) -> None:
        track(optimizer, grad)
        optimizer.local_overflow = False

    return tracked
