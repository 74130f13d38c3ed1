"""Which kernel can be named where: what it is installed as, the device it runs on, and what it computes in.

That a package is there is found without importing it, and so without torch. `rlexp.ring.kernels` asks the same again
on the ranks, for `parallel.kernel=auto`; a test holds both to one answer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from rlexp.config.layouts import Heads
from rlexp.config.schema import Config, Device, KernelName, Precision
from rlexp.errors import ConfigError

CUDA = (KernelName.torch_flash, KernelName.flash_attn, KernelName.flash_attn_3, KernelName.flash_attn_4)
LARGEST_HEAD = {KernelName.flash_attn_4: 128}  # of the others 256
INSTALL = {
    KernelName.flash_attn: "`pip install rlexp[flash]`, which builds flash-attn where there is no wheel for your torch",
    KernelName.flash_attn_3: "Build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    KernelName.flash_attn_4: "`pip install flash-attn-4`",
}


def check_kernel(cfg: Config, heads: Heads | None, *, here: bool = True) -> None:
    """Of a model with these heads; None where they are not known yet. Elsewhere, as on the nodes of a cluster, other
    packages may be installed than here."""
    kernel, device, precision = cfg.parallel.kernel, cfg.launch.device, cfg.train.precision
    what = f"parallel.kernel={kernel.value}"
    if device is Device.cuda and kernel is KernelName.cpu_flash:
        raise ConfigError(f"{what}: runs on CPU only, and launch.device=cuda. Use parallel.kernel=auto.")
    if kernel not in CUDA:
        return
    if device is Device.cpu:
        raise ConfigError(f"{what}: runs on GPUs only, and launch.device=cpu. Use parallel.kernel=auto.")
    if precision is not Precision.bf16:
        raise ConfigError(
            f"{what}: computes in 16 bits only, and train.precision={precision.value}. Use parallel.kernel=auto, which "
            f"is parallel.kernel=plain there, or train.precision=bf16."
        )
    _refuse_unless_heads_fit(kernel, heads)
    if here and not installed(kernel):
        raise ConfigError(f"{what}: its package is not installed. {INSTALL[kernel]}, or use parallel.kernel=auto.")


def _refuse_unless_heads_fit(kernel: KernelName, heads: Heads | None) -> None:
    largest = LARGEST_HEAD.get(kernel, 256)
    if heads is not None and (heads.size > largest or heads.size % 8):
        raise ConfigError(
            f"parallel.kernel={kernel.value}: takes heads whose size is a multiple of 8 and at most {largest}, and the "
            f"model's is {heads.size}. Use parallel.kernel=auto, which takes one that fits."
        )


def installed(kernel: KernelName) -> bool:
    match kernel:
        case KernelName.flash_attn:  # by its extension: a folder flash_attn is also of flash-attn 4
            return importlib.util.find_spec("flash_attn_2_cuda") is not None
        case KernelName.flash_attn_3:
            return importlib.util.find_spec("flash_attn_interface") is not None
        case KernelName.flash_attn_4:
            try:
                return bool(importlib.metadata.version("flash-attn-4"))
            except importlib.metadata.PackageNotFoundError:
                return False
    return True  # it comes with torch
