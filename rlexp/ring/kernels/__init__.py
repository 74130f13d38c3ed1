"""Block kernels behind one interface. One file each."""

from __future__ import annotations

import torch

from rlexp.ring.kernels import flash_attn_2, flash_attn_3, flash_attn_4
from rlexp.ring.kernels.base import HALF, BlockKernel
from rlexp.ring.kernels.cpu_flash import CpuFlash
from rlexp.ring.kernels.flash_attn_2 import FlashAttn2
from rlexp.ring.kernels.flash_attn_3 import FlashAttn3
from rlexp.ring.kernels.flash_attn_4 import FlashAttn4
from rlexp.ring.kernels.plain import Plain
from rlexp.ring.kernels.torch_flash import TorchFlash

__all__ = ["BlockKernel", "available", "computing_in", "fits", "get_kernel"]

AMPERE, HOPPER, BLACKWELL = 8, 9, 10  # major compute capability


def get_kernel(
    name: str, device_type: str, dtype: torch.dtype = torch.float32, head_size: int | None = None
) -> BlockKernel:
    """`auto` is the fastest that there is for the device, the dtype, and heads of this size, where that is known.

    On CUDA in bfloat16 or float16: flash-attn 3 on Hopper and 4 on Blackwell use what those have for matrices and for
    copies, about 1.5 times as fast as flash-attn 2, which runs everywhere since Ampere; torch's own kernel is a copy of
    that, as fast or a little behind, and needs no package. No flash kernel takes float32 or float64: there it is
    `plain`. On CPU torch's flash kernel takes all four.
    """
    match name:
        case "auto":
            return available(device_type, dtype, head_size)[0]
        case "cpu_flash":
            return CpuFlash()
        case "torch_flash":
            return TorchFlash()
        case "flash_attn":
            return FlashAttn2()
        case "flash_attn_3":
            return FlashAttn3()
        case "flash_attn_4":
            return FlashAttn4()
        case "plain":
            return Plain()
    raise ValueError(f"no kernel {name}")


def available(device_type: str, dtype: torch.dtype, head_size: int | None = None) -> list[BlockKernel]:
    """The kernels that run here, the fastest first."""
    if device_type == "cpu":
        return [CpuFlash(), Plain()]
    major = torch.cuda.get_device_capability()[0]
    if dtype not in HALF or major < AMPERE:
        return [Plain()]
    found: list[BlockKernel] = []
    if major == HOPPER and flash_attn_3.installed():
        found.append(FlashAttn3())
    if major in (BLACKWELL, BLACKWELL + 1) and flash_attn_4.installed():
        found.append(FlashAttn4())
    if flash_attn_2.installed():
        found.append(FlashAttn2())
    found.append(TorchFlash())
    return [*(kernel for kernel in found if head_size is None or fits(kernel.name, head_size)), Plain()]


def fits(name: str, head_size: int) -> bool:
    """Whether the kernel takes heads of this size."""
    largest = {"torch_flash": 256, "flash_attn": 256, "flash_attn_3": 256, "flash_attn_4": 128}.get(name)
    return largest is None or (head_size <= largest and head_size % 8 == 0)


def computing_in(dtype: torch.dtype, kernel: BlockKernel, head_size: int | None = None) -> BlockKernel:
    """The run's kernel where it computes in this dtype, and with heads of this size, or else the reference: to probe a
    model and a layout in float64 where the run itself is in bfloat16, and for a model that is not the run's."""
    able = dtype in kernel.dtypes and (head_size is None or fits(kernel.name, head_size))
    return kernel if able else Plain()
