"""Block kernels behind one interface, one file each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlexp.base.errors import ConfigError
from rlexp.base.kernel_needs import able, installed, takes
from rlexp.base.kernel_rates import ranked
from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.ring.kernels.cpu_flash import CpuFlash
from rlexp.training.ring.kernels.flash import FlashAttn2, FlashAttn3, TorchFlash
from rlexp.training.ring.kernels.flash_attn_4 import FlashAttn4
from rlexp.training.ring.kernels.plain import Plain

__all__ = ["BlockKernel", "available", "computing_in", "get_kernel"]

KERNELS: dict[str, Callable[[], BlockKernel]] = {
    each.name: each for each in (FlashAttn3, FlashAttn4, FlashAttn2, TorchFlash, CpuFlash, Plain)
}
USUAL = Ask(1.0)
LONG = 8192  # tokens, where nothing says how many a rank has


def get_kernel(
    name: str,
    device_type: str,
    dtype: torch.dtype = torch.float32,
    head_size: int | None = None,
    ask: Ask = USUAL,
    tokens: int = LONG,
    generation: int | None = None,
) -> BlockKernel:
    """Return the kernel of this name; `auto` is the fastest for the device, the dtype, and the layers if known.

    On CUDA in 16 bits that is the installed one which takes the least time for both passes (`base/kernel_rates.py`).
    None of them takes float32 or float64: `auto` is then `plain`. On CPU torch's flash kernel takes all four dtypes.
    `generation` is that of the GPU, if it is not this machine's.
    """
    generation = generation or _generation_of(device_type)
    if name == "auto":
        return available(device_type, dtype, head_size, ask, tokens, generation)[0]
    if name not in KERNELS:
        raise ValueError(f"no kernel {name}")
    kernel = _made(name, generation)
    if why := kernel.refuses(ask):
        others = available(device_type, dtype, head_size, ask, tokens, generation)
        instead = " or ".join(f"parallel.kernel={each.name}" for each in others)
        raise ConfigError(f"parallel.kernel={name}: this version does not compute {why}, which the model needs. "
                          f"Use {instead}, or parallel.kernel=auto.")  # fmt: skip
    return kernel


def available(
    device_type: str,
    dtype: torch.dtype,
    head_size: int | None = None,
    ask: Ask = USUAL,
    tokens: int = LONG,
    generation: int | None = None,
) -> list[BlockKernel]:
    """Return the kernels that run on this machine, or on such a GPU with its packages, the fastest first."""
    if device_type == "cpu":
        return [CpuFlash(), Plain()]
    generation = generation or _generation_of(device_type)
    names = able(generation, head_size, deterministic=torch.are_deterministic_algorithms_enabled())
    names = [
        name
        for name in names
        if installed(name) and (head_size is None or takes(name, head_size)) and dtype in KERNELS[name]().dtypes
    ]
    kernels = [_made(name, generation) for name in ranked(names, generation, head_size, tokens)]
    return [*(kernel for kernel in kernels if not kernel.refuses(ask)), Plain()]


def generation_here() -> int | None:
    """Return the major compute capability of this process's GPU; None if there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def _generation_of(device_type: str) -> int | None:
    """Ask CUDA alone: a rehearsal's device is none, and a process that asks takes memory of the GPU."""
    return generation_here() if device_type == "cuda" else None


def _made(name: str, generation: int | None) -> BlockKernel:
    kernel = KERNELS[name]()
    kernel.generation = generation
    return kernel


def computing_in(
    dtype: torch.dtype, kernel: BlockKernel, head_size: int | None = None, ask: Ask = USUAL
) -> BlockKernel:
    """Return the run's kernel if it computes this, in this dtype and with heads of this size, otherwise the reference.

    So a model and a layout are probed in float64 while the run is in bfloat16, and a reward model may have other heads
    and windows than the policy.
    """
    computes = dtype in kernel.dtypes and (head_size is None or takes(kernel.name, head_size, kernel.generation))
    return kernel if computes and not kernel.refuses(ask) else Plain()
