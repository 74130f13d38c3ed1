"""Checks of `parallel.kernel`: its device, its precision, and what it needs on this machine."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.base.kernel_needs import NEEDS, fits, installed
from rlexp.config.checks.layout import Heads
from rlexp.config.hardware import gpu_generations
from rlexp.config.schema import Config, Device, KernelName
from rlexp.config.schema.models import Precision


def check_kernel(cfg: Config, heads: Heads | None, *, here: bool = True, generation: int | None = None) -> None:
    """Refuse a kernel that cannot run. `heads` is None while unknown.

    Without `here`, a node of a cluster runs it, whose packages and GPUs are unknown. A rank passes the `generation` of
    its own GPU; before ranks start, one GPU that fits is enough.
    """
    kernel, device, precision = cfg.parallel.kernel, cfg.launch.device, cfg.train.precision
    what = f"parallel.kernel={kernel.value}"
    if device is Device.cuda and kernel is KernelName.cpu_flash:
        raise ConfigError(f"{what}: runs on CPU only, and launch.device=cuda. Use parallel.kernel=auto.")
    if kernel.value not in NEEDS:
        return
    needs = NEEDS[kernel.value]
    if device is Device.cpu:
        raise ConfigError(f"{what}: runs on GPUs only, and launch.device=cpu. Use parallel.kernel=auto.")
    if precision is not Precision.bf16:
        raise ConfigError(
            f"{what}: computes in 16 bits only, and train.precision={precision.value}. Use parallel.kernel=auto, which "
            f"takes parallel.kernel=plain there, or train.precision=bf16."
        )
    if heads is not None and not fits(kernel.value, heads.size):
        raise ConfigError(
            f"{what}: takes heads whose size is a multiple of 8 and at most {needs.largest_head}, and the model's is "
            f"{heads.size}. Use parallel.kernel=auto, which takes one that fits."
        )
    if not here:
        return
    there = {generation} if generation is not None else gpu_generations()
    if there and not there & {*needs.generations}:
        least, most = needs.generations[0], needs.generations[-1]
        wanted = f"{least}" if least == most else f"{least} and above" if most > 50 else f"{least} to {most}"
        raise ConfigError(
            f"{what}: runs on GPUs of compute capability {wanted}, and this machine's have "
            f"{' and '.join(map(str, sorted(there)))}. Use parallel.kernel=auto, which takes the fastest that runs."
        )
    if not installed(kernel.value):
        raise ConfigError(f"{what}: its package is not installed. {needs.install}, or use parallel.kernel=auto.")
