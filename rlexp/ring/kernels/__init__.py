"""Block kernels behind one interface. One file each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlexp.kernels import NEEDS, fits, installed
from rlexp.ring.kernels.base import BlockKernel
from rlexp.ring.kernels.cpu_flash import CpuFlash
from rlexp.ring.kernels.flash_attn_2 import FlashAttn2
from rlexp.ring.kernels.flash_attn_3 import FlashAttn3
from rlexp.ring.kernels.flash_attn_4 import FlashAttn4
from rlexp.ring.kernels.plain import Plain
from rlexp.ring.kernels.torch_flash import TorchFlash

__all__ = ["BlockKernel", "available", "computing_in", "get_kernel"]

FASTEST: tuple[Callable[[], BlockKernel], ...] = (FlashAttn3, FlashAttn4, FlashAttn2, TorchFlash)  # first, on GPUs


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
    generation = torch.cuda.get_device_capability()[0]
    return [*(each for each in (make() for make in FASTEST) if _runs(each, generation, dtype, head_size)), Plain()]


def _runs(kernel: BlockKernel, generation: int, dtype: torch.dtype, head_size: int | None) -> bool:
    able = dtype in kernel.dtypes and generation in NEEDS[kernel.name].generations and installed(kernel.name)
    return able and (head_size is None or fits(kernel.name, head_size))


def computing_in(dtype: torch.dtype, kernel: BlockKernel, head_size: int | None = None) -> BlockKernel:
    """The run's kernel where it computes in this dtype, and with heads of this size, or else the reference: to probe a
    model and a layout in float64 where the run itself is in bfloat16, and for a model that is not the run's."""
    able = dtype in kernel.dtypes and (head_size is None or fits(kernel.name, head_size))
    return kernel if able else Plain()
