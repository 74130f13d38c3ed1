"""Checks of `parallel.kernel`: its device, its precision, and what it needs on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from rlexp.base.errors import ConfigError
from rlexp.base.kernel_needs import NEEDS, able, built, fits, installed, takes
from rlexp.config.checks.layout import Heads
from rlexp.config.hardware import gpu_generations
from rlexp.config.schema import Config, Device, KernelName, Precision


def tokens_of_rank(cfg: Config) -> int:
    """Return the tokens that a rank has of the longest sequence, for which `auto` chooses."""
    return max(1, cfg.data.max_length // cfg.parallel.ring_size)


def check_kernel(cfg: Config, heads: Heads | None, *, here: bool = True, generation: int | None = None) -> None:
    """Refuse a kernel that cannot run. `heads` is None while unknown.

    Without `here`, a node of a cluster runs it: its packages are unknown, and its GPUs are those of `hardware`. A rank
    passes the `generation` of its own GPU; before ranks start, one GPU that fits is enough.
    """
    kernel, device, precision = cfg.parallel.kernel, cfg.launch.device, cfg.train.precision
    what = f"parallel.kernel={kernel.value}"
    if device is Device.cuda and kernel is KernelName.cpu_flash:
        raise ConfigError(f"{what}: runs on CPU only, and launch.device=cuda. Use parallel.kernel=auto.")
    if kernel.value not in NEEDS:
        return
    if device is Device.cpu:
        raise ConfigError(f"{what}: runs on GPUs only, and launch.device=cpu. Use parallel.kernel=auto.")
    if precision is not Precision.bf16:
        raise ConfigError(
            f"{what}: computes in 16 bits only, and train.precision={precision.value}. Use parallel.kernel=auto, which "
            f"takes parallel.kernel=plain there, or train.precision=bf16."
        )
    described = {cfg.hardware.generation} - {0}
    generations = {generation} if generation is not None else gpu_generations() if here else described
    if why := _unable(cfg, heads, generations):
        raise ConfigError(f"{what}: {why}. Use {_instead(cfg, heads, generations, here=here)}.")
    if here and not installed(kernel.value):
        needs = NEEDS[kernel.value]
        lacking = f"is not installed in version {needs.least} or later" if needs.least else "is not installed"
        others = _instead(cfg, heads, generations, here=here)
        raise ConfigError(f"{what}: its package {lacking}. {needs.install}, or use {others}.")
    if here and heads is not None and (why := not_built(kernel.value, heads)):
        raise ConfigError(f"{what}: {why}. Use {_instead(cfg, heads, generations, here=here)}.")


def not_built(name: str, heads: Heads) -> str | None:
    """Say that the installed package was built without such heads; None if it has them."""
    if takes(name, heads.size) or (part := built(name)) is None:
        return None
    version, sizes = part
    return f"the installed version {version} has heads of {_listed(sizes)} only, and the model's are {heads.size}"


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _unable(cfg: Config, heads: Heads | None, generations: set[int]) -> str | None:
    """Say why none of the GPUs can run the kernel with these heads; without GPUs, whether any kind can."""
    name, needs = cfg.parallel.kernel.value, NEEDS[cfg.parallel.kernel.value]
    have = f"this run's have {_listed(generations)}"
    if generations and not generations & needs.heads.keys():
        return f"runs on GPUs of compute capability {_spoken([*needs.heads])}, and {have}"
    able_there = {each for each in generations if each in needs.heads} or {*needs.heads}
    if heads is not None and not any(fits(name, heads.size, each) for each in able_there):
        most = max(needs.heads[each] for each in able_there)
        on_them = f" on GPUs of compute capability {_spoken(sorted(able_there))}" if generations else ""
        return f"takes heads whose size is a multiple of 8 and at most {most}{on_them}, and the model's is {heads.size}"
    if cfg.launch.deterministic and generations and able_there <= {*needs.varies}:
        return (
            f"has no deterministic backward pass on GPUs of compute capability {_spoken(sorted(able_there))}, and "
            f"launch.deterministic=true"
        )
    return None


def _spoken(generations: list[int]) -> str:
    least, most = generations[0], generations[-1]
    return f"{least}" if least == most else f"{least} and above" if most > 50 else f"{least} to {most}"


def _instead(cfg: Config, heads: Heads | None, generations: set[int], *, here: bool) -> str:
    """Name the kernels that the GPUs can run with these heads, of which `auto` takes the fastest."""
    size = heads.size if heads is not None else None
    kinds: list[int | None] = [*sorted(generations)] or [None]
    names = [name for each in kinds for name in able(each, size, deterministic=cfg.launch.deterministic)]
    others = [name for name in dict.fromkeys(names) if name != cfg.parallel.kernel.value]
    runnable = [name for name in others if not here or (installed(name) and (size is None or takes(name, size)))]
    named = [f"parallel.kernel={name}" for name in (*runnable, KernelName.plain.value)]
    return f"{', '.join(named)}, or parallel.kernel=auto, which takes the fastest that runs"
