"""The memory peak of a step: the allocator's on CUDA, the resident set's on CPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # a container may forbid it: the peak is then the process's so far
            return


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
