"""The learning rate as a pure function of the step, so that a position is nothing but a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlexp.config.schema import Decay


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over `warmup_steps`, then decay to 0 just after `total_steps`."""

    lr: float
    warmup_steps: int
    total_steps: int
    decay: Decay

    def at(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 1; the first step of a warm-up already trains."""
        if step <= self.warmup_steps:
            return self.lr * step / (self.warmup_steps + 1)
        span = max(1, self.total_steps - self.warmup_steps)
        done = (step - 1 - self.warmup_steps) / span
        match self.decay:
            case Decay.constant:
                return self.lr
            case Decay.linear:
                return self.lr * max(0.0, 1 - done)
            case Decay.cosine:
                return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
