"""The limits of parallel.backend=ring_flash_attn, with which the library ring-flash-attn computes attention."""

from __future__ import annotations

from importlib.util import find_spec

from rlexp.base.errors import ConfigError
from rlexp.config.checks.kernel import not_built
from rlexp.config.checks.layout import Heads
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import BackendName, Checkpointing, Config, Device, KernelName, LayoutName, TransportName
from rlexp.config.schema.models import Precision

LAYOUTS = (LayoutName.zigzag, LayoutName.allgather)
# Packages by a module of theirs. flash-attn 2 is known by its extension: flash-attn 4 has a folder flash_attn too.
PACKAGES = {"ring_flash_attn": "ring-flash-attn", "flash_attn_2_cuda": "flash-attn"}
MULTIPLE, LARGEST = 8, 256  # size of a head, in flash-attn
NAMED = "parallel.backend=ring_flash_attn"
INSTEAD = "or parallel.backend=native."
ABLE = " or ".join(f"parallel.layout={each.value}" for each in LAYOUTS)


RULES = (
    Check("parallel.backend", lambda cfg: cfg.parallel.layout not in LAYOUTS,
          f"parallel.layout={{parallel.layout.value}} {{why}}. Use {ABLE}, {INSTEAD}"),
    Check("parallel.backend", lambda cfg: cfg.parallel.kernel is not KernelName.auto,
          "always uses flash-attn's kernel, and parallel.kernel={parallel.kernel.value} names another. Leave "
          f"parallel.kernel out, {INSTEAD}"),
    Check("parallel.backend", lambda cfg: cfg.parallel.transport is not TransportName.auto,
          "has its own transport, and parallel.transport={parallel.transport.value} names another. Leave "
          f"parallel.transport out, {INSTEAD}"),
    Check("parallel.backend", lambda cfg: cfg.memory.recomputed is Checkpointing.attention,
          "attends inside the library, and memory.checkpointing=attention keeps what rlexp's own attention gives. Use "
          f"memory.checkpointing=full, {INSTEAD}"),
    Check("parallel.backend", lambda cfg: cfg.launch.device is Device.cpu,
          f"runs on GPUs only, and launch.device=cpu. Use launch.device=cuda, {INSTEAD}"),
    Check("parallel.backend", lambda cfg: cfg.train.precision is not Precision.bf16,
          f"cannot compute in train.precision={{train.precision.value}}. Use bf16, {INSTEAD}"),
)  # fmt: skip


def check_backend(cfg: Config, heads: Heads | None, *, here: bool = True) -> None:
    """Refuse what the library cannot do. `heads` is None while unknown; with `here`, this machine runs it."""
    if cfg.parallel.backend is BackendName.native:
        return
    named = cfg.parallel.layout is not LayoutName.auto
    refuse_broken(RULES, cfg, why="is not one of its layouts" if named else "compares rlexp's own layouts only")
    if heads is not None and (heads.size % MULTIPLE or heads.size > LARGEST):
        raise ConfigError(
            f"{NAMED}: the model's heads are of size {heads.size}, and flash-attn needs a multiple of {MULTIPLE} up to "
            f"{LARGEST}. Use parallel.backend=native."
        )
    window = min(filter(None, heads.windows if heads else ()), default=cfg.data.max_length)
    if window < cfg.data.max_length:
        layouts = ", ".join(each.value for each in LayoutName if each is not LayoutName.auto)
        raise ConfigError(
            f"{NAMED}: some layers of the model see {window:,} positions only, and data.max_length="
            f"{cfg.data.max_length}; the library has no windows. Use parallel.backend=native, whose layouts all have "
            f"them ({layouts})."
        )
    missing = [name for module, name in PACKAGES.items() if here and find_spec(module) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{NAMED}: {' and '.join(missing)} {are} not installed. Run `pip install -e '.[ring]'` in a checkout, "
            f"{INSTEAD}"
        )
    if here and heads is not None and (lacking := not_built("flash_attn", heads)):
        raise ConfigError(f"{NAMED}: {lacking}. Use parallel.backend=native.")
