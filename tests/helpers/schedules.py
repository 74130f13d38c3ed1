"""The learning rates that transformers' own schedulers give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rates_of(scheduler: Callable[[torch.optim.Optimizer], Any], lr: float, steps: int) -> list[float]:
    """Return the rate of each step, as a trainer takes them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates
