"""Block kernels behind one interface. One file each."""

from __future__ import annotations

from rlexp.config.schema import KernelName
from rlexp.ring.kernels.base import BlockKernel
from rlexp.ring.kernels.cpu_flash import CpuFlash
from rlexp.ring.kernels.plain import Plain

__all__ = ["BlockKernel", "get_kernel"]


def get_kernel(name: KernelName, device_type: str) -> BlockKernel:
    """`auto` is the fastest there is for the device."""
    match name:
        case KernelName.auto:
            return CpuFlash() if device_type == "cpu" else Plain()
        case KernelName.cpu_flash:
            return CpuFlash()
        case KernelName.plain:
            return Plain()
