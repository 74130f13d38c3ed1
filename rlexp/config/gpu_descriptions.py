"""The descriptions of GPUs in `conf/hardware/`, and `hardware=auto` by this machine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlexp.base import plain_yaml
from rlexp.config.hardware import hardware_here, memory_here
from rlexp.config.paths import conf_dir
from rlexp.config.schema import HardwareConfig, Precision

TYPICAL = "h100"  # the rates of a GPU that is not known: they rank changes, and decide nothing


def described(option: str) -> dict[str, Any]:
    """Return what `conf/hardware/` says of an option; empty if there is none of this name."""
    return plain_yaml.mapping_in(conf_dir() / "hardware" / f"{option}.yaml")


def peak_flops(sheet: Mapping[str, Any], precision: Precision) -> float:
    """Return a data sheet's operations per second in a precision; 0 if it does not say."""
    return 1e12 * float(sheet.get(f"{precision.value}_tflops") or 0.0)


def gpu_of(hardware: HardwareConfig, *, here: bool = True) -> HardwareConfig | None:
    """Return `hardware=auto` with what was left out; None if the memory is not known. With `here`, this machine's GPUs
    are the run's, and tell it."""
    option = hardware_here() if here else None
    like = described(option or TYPICAL)
    given = {key: value for key, value in vars(hardware).items() if value}
    if hardware.memory_gib:
        like["reserve_gib"] = hardware.reserve_gib
    elif here and (memory := memory_here()) is not None:
        like["memory_gib"] = memory
    else:
        return None
    return HardwareConfig(**(like | given | {"name": option or hardware.name}))
