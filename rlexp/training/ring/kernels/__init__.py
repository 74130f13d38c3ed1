"""Block kernels behind one interface, one file each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlexp.base.errors import ConfigError
from rlexp.base.kernel_needs import NEEDS, fits, installed
from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.ring.kernels.cpu_flash import CpuFlash
from rlexp.training.ring.kernels.flash_attn_2 import FlashAttn2
from rlexp.training.ring.kernels.flash_attn_3 import FlashAttn3
from rlexp.training.ring.kernels.flash_attn_4 import FlashAttn4
from rlexp.training.ring.kernels.plain import Plain
from rlexp.training.ring.kernels.torch_flash import TorchFlash

__all__ = ["BlockKernel", "available", "computing_in", "get_kernel"]

# Kernels for GPUs, the fastest first.
FASTEST: tuple[Callable[[], BlockKernel], ...] = (FlashAttn3, FlashAttn4, FlashAttn2, TorchFlash)
USUAL = Ask(1.0)
KERNELS: tuple[Callable[[], BlockKernel], ...] = (*FASTEST, CpuFlash, Plain)


def get_kernel(
    name: str, device_type: str, dtype: torch.dtype = torch.float32, head_size: int | None = None, ask: Ask = USUAL
) -> BlockKernel:
    """Return the kernel of this name; `auto` is the fastest for the device, the dtype, and the layers if known.

    On CUDA in 16 bits, flash-attn 3 on Hopper and 4 on Blackwell are about 1.5 times as fast as flash-attn 2, which
    runs everywhere since Ampere. torch's own kernel is a copy of that, as fast or slightly slower, and needs no
    package. None takes float32 or float64: `auto` is then `plain`. On CPU torch's flash kernel takes all four dtypes.
    """
    if name == "auto":
        return available(device_type, dtype, head_size, ask)[0]
    kernel = next((kernel for kernel in (make() for make in KERNELS) if kernel.name == name), None)
    if kernel is None:
        raise ValueError(f"no kernel {name}")
    if why := kernel.refuses(ask):
        instead = " or ".join(f"parallel.kernel={x.name}" for x in available(device_type, dtype, head_size, ask))
        raise ConfigError(f"parallel.kernel={name}: this version does not compute {why}, which the model needs. "
                          f"Use {instead}, or parallel.kernel=auto.")  # fmt: skip
    return kernel


def available(
    device_type: str, dtype: torch.dtype, head_size: int | None = None, ask: Ask = USUAL
) -> list[BlockKernel]:
    """Return the kernels that run on this machine, the fastest first."""
    if device_type == "cpu":
        return [CpuFlash(), Plain()]
    generation = torch.cuda.get_device_capability()[0]
    able = [kernel for kernel in (make() for make in FASTEST) if _runs(kernel, generation, dtype, head_size)]
    return [*(kernel for kernel in able if not kernel.refuses(ask)), Plain()]


def _runs(kernel: BlockKernel, generation: int, dtype: torch.dtype, head_size: int | None) -> bool:
    able = dtype in kernel.dtypes and generation in NEEDS[kernel.name].generations and installed(kernel.name)
    return able and (head_size is None or fits(kernel.name, head_size))


def computing_in(
    dtype: torch.dtype, kernel: BlockKernel, head_size: int | None = None, ask: Ask = USUAL
) -> BlockKernel:
    """Return the run's kernel if it computes this, in this dtype and with heads of this size, otherwise the reference.

    So a model and a layout are probed in float64 while the run is in bfloat16, and a reward model may have other heads
    and windows than the policy.
    """
    able = dtype in kernel.dtypes and (head_size is None or fits(kernel.name, head_size))
    return kernel if able and not kernel.refuses(ask) else Plain()
