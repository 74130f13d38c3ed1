"""The GPUs of this machine, found without importing torch, or anything that is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_ASSUMED: ContextVar[int | None] = ContextVar("assumed GPUs", default=None)


@contextlib.contextmanager
def assumed_gpus(count: int) -> Iterator[None]:
    """Compose as on a machine with so many GPUs."""
    token = _ASSUMED.set(count)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def gpus_assumed() -> bool:
    """Return whether a configuration is composed as on another machine."""
    return _ASSUMED.get() is not None


def visible_gpus() -> int:
    """Count the GPUs that this process may use: the driver's, limited by CUDA_VISIBLE_DEVICES."""
    if (assumed := _ASSUMED.get()) is not None:
        return assumed
    folder = Path("/proc/driver/nvidia/gpus")
    listing = [*folder.iterdir()] if folder.is_dir() else [each for each in _driver_says("-L") if each[:4] == "GPU "]
    present = len(listing)
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if masked is None or present == 0:
        return present
    listed = [entry.strip() for entry in masked.split(",") if entry.strip()]
    if "-1" in listed:  # CUDA ignores all entries after the first invalid one
        listed = listed[: listed.index("-1")]
    return min(present, len(listed))


TORCH_BUILT_FOR = "RLEXP_TORCH_BUILT_FOR"  # overrules what torch says of itself, where GPUs are only played: cpu, cuda


TORCH_WITHOUT_CUDA = (
    "launch.device=cuda: the installed torch was built without CUDA, and cannot use this machine's GPUs. "
    "Install a torch built for CUDA (on Linux `pip install --force-reinstall torch` takes one; "
    "https://pytorch.org/get-started lists them), or use launch.device=cpu."
)


def gpus_without_torch() -> bool:
    """Return whether this machine has GPUs that the installed torch was not built for."""
    if _ASSUMED.get() is not None or visible_gpus() == 0:
        return False
    return os.environ.get(TORCH_BUILT_FOR, _torch_built_for()) == "cpu"


@functools.cache
def _torch_built_for() -> str:
    """Read torch's own file of its version, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError):
            if re.search(r"^cuda\b.*= *None", (Path(folder) / "version.py").read_text(encoding="utf-8"), re.MULTILINE):
                return "cpu"
    return "cuda"


NAMES = {  # how nvidia-smi and torch name a GPU, and the option of `hardware` that describes it; the first that fits
    "H200": "h200",
    "H100": "h100",
    "A100-SXM4-40GB": "a100_40gb",
    "A100-PCIE-40GB": "a100_40gb",
    "A100": "a100",
    "B200": "b200",
    "L40S": "l40s",
    "RTX 4090": "rtx_4090",
}


def hardware_here() -> str | None:
    """Return the option of `hardware` that describes this machine's first GPU; None if it is unknown, or none."""
    return option_of(next(iter(_driver_says("--query-gpu=name", "--format=csv,noheader")), ""))


def option_of(gpu: str) -> str | None:
    """Return the option of `hardware` that describes a GPU of this name; None if it is unknown."""
    return next((option for name, option in NAMES.items() if name in gpu), None)


AS_CUDA_SEES = 0.993  # of the memory that nvidia-smi reports, which counts what the driver keeps for itself


def memory_here() -> float | None:
    """Return the GiB of this machine's smallest GPU, as torch reports it; None if that cannot be told."""
    if "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):  # a part of a GPU; nvidia-smi reports the whole
        return None
    lines = [line.strip() for line in _driver_says("--query-gpu=memory.total", "--format=csv,noheader,nounits")]
    sizes = [int(line) for line in lines if line.isdecimal()]
    return round(min(sizes) / 1024 * AS_CUDA_SEES, 1) if sizes else None


def gpu_generations() -> set[int]:
    """Return the major compute capabilities of this machine's GPUs; empty if nvidia-smi does not answer."""
    lines = _driver_says("--query-gpu=compute_cap", "--format=csv,noheader")
    return {int(major) for major in (line.partition(".")[0].strip() for line in lines) if major.isdecimal()}


def _driver_says(*asked: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines()
