"""How long a device takes for a part of a step: by events on a GPU, whose host runs ahead, else by the host's clock."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began = self._ended = self._mark()

    def stop(self) -> None:
        self._ended = self._mark()

    def seconds(self) -> float:
        """Return the seconds until it was stopped last, once the device has come so far."""
        if self._on_gpu:
            return float(self._began.elapsed_time(self._ended)) / 1000
        return float(self._ended - self._began)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
