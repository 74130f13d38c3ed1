"""Compose a configuration as on hardware that is not here, to predict the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlexp.base.byte_counts import GIB
from rlexp.base.errors import ConfigError
from rlexp.base.host_memory import host_memory
from rlexp.config.gpu_descriptions import described
from rlexp.config.hardware import NAMES, assumed_gpus, hardware_here
from rlexp.config.load import composed, from_hydra
from rlexp.config.options import quoted
from rlexp.config.paths import config_root
from rlexp.config.schema import Config, with_values
from rlexp.config.schema.rollouts import RolloutMode


def compose_elsewhere(overrides: Sequence[str]) -> Config:
    """Return the configuration that these overrides have on the hardware that they name."""
    named = any(each.startswith("hardware=") and each != "hardware=auto" for each in overrides)
    if not named and (here := hardware_here()) is None:
        raise ConfigError(
            f"hardware=auto: no GPU is visible here, or none that is known. Name the hardware of the run: "
            f"hardware={' or hardware='.join(dict.fromkeys(NAMES.values()))}."
        )
    given = [*overrides] if named else [f"hardware={here}", *overrides]
    # The GPUs of a node are read before the configuration is composed.
    option = [each.partition("=")[2] for each in given if each.startswith("hardware=")][-1]
    own = [each.partition("=")[2] for each in given if each.startswith("hardware.gpus=")]
    gpus = int(own[-1]) if own and own[-1].isdecimal() else int(described(option).get("gpus", 8))
    with assumed_gpus(gpus):
        cfg = from_hydra(composed(["launch.device=cuda", *given]), here=False, reads_rows=False)
    _check(cfg, gpus)
    if named or cfg.hardware.host_memory_gib or (memory := host_memory()) is None:
        return cfg
    # of this machine, whose GPUs are the run's
    return with_values(cfg, "hardware", host_memory_gib=round(memory.total / GIB, 1))


def composed_for(overrides: Sequence[str], searched: Path) -> Config:
    """Return the configuration that these overrides have on GPUs of any kind, with options of another folder too."""
    path = [quoted(f"file://{folder}") for folder in (config_root() / "launchers", config_root() / "sweeps", searched)]
    with assumed_gpus(8):
        return from_hydra(composed([f"hydra.searchpath=[{','.join(path)}]", *overrides]), here=False)


def _check(cfg: Config, gpus: int) -> None:
    if cfg.launch.device.value != "cuda":
        raise ConfigError(f"launch.device={cfg.launch.device.value}: preflight predicts runs on GPUs. Leave it out.")
    if why := unrehearsable(cfg):
        raise ConfigError(why)
    each = cfg.launch.ranks_per_gpu
    if cfg.launch.nproc > gpus * each:
        of_each = "one for each rank" if each == 1 else f"and launch.ranks_per_gpu={each} ranks on each"
        raise ConfigError(
            f"launch.nproc={cfg.launch.nproc}: a node of hardware={cfg.hardware.name} has {gpus} "
            f"GPU{'s' * (gpus > 1)}, {of_each}. Use "
            f"launch.nproc={gpus * each}, more launch.nodes, or hardware.gpus={-(-cfg.launch.nproc // each)}."
        )
    for key in ("memory_gib", "bf16_tflops", "fp32_tflops", "memory_tb_s", "link_gb_s", "network_gb_s"):
        if not getattr(cfg.hardware, key):
            raise ConfigError(f"hardware.{key}=0: a prediction needs it. Give a number greater than 0.")


def unrehearsable(cfg: Config) -> str | None:
    """Return why a run cannot be rehearsed, with what can be done; None if it can."""
    if not cfg.loss.draws or cfg.rollout.mode is not RolloutMode.pipelined:
        return None
    return (
        "rollout.mode=pipelined: cannot be rehearsed, since its ranks differ. With rollout=default preflight tells "
        "what a rank holds that does both: a rank that only trains has no cache of keys and values and no vLLM, one "
        "that only samples has weights and that cache, or vLLM alone."
    )
