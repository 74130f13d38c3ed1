"""The learning rate as a pure function of the step, so that a position is nothing but a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlexp.config.schema import Decay

AS_WARM = 10_000  # the warm-up from which an inverse square root falls that has none, as in transformers


def warm_up_of(steps: int, ratio: float) -> int:
    """Return the steps of a warm-up that is a share of a run: rounded as transformers does it, in floats."""
    return math.ceil(steps * ratio)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over `warmup_steps`, then decay until just after `total_steps`."""

    lr: float
    warmup_steps: int
    total_steps: int
    decay: Decay
    warmup_start: float | None = None  # share of `lr` in the first step; None: as much as each further step adds
    min_lr_ratio: float = 0.0

    def at(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup_steps:
            start = 1 / (self.warmup_steps + 1) if self.warmup_start is None else self.warmup_start
            return self.lr * (start + (1 - start) * (step - 1) / self.warmup_steps)
        after = step - 1 - self.warmup_steps
        done = min(1.0, after / max(1, self.total_steps - self.warmup_steps))
        match self.decay:
            case Decay.constant:
                return self.lr
            case Decay.linear:
                return self.lr * self._from(1 - done)
            case Decay.cosine:
                return self.lr * self._from(0.5 * (1 + math.cos(math.pi * done)))
            case Decay.inverse_sqrt:
                scale = self.warmup_steps or AS_WARM
                return self.lr / math.sqrt((after + scale) / scale)

    def _from(self, left: float) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left

    def in_words(self) -> str:
        """`warm-up 10 steps, then linear to 0`"""
        warm = f"warm-up {self.warmup_steps} step{'s' * (self.warmup_steps != 1)}, then " if self.warmup_steps else ""
        to = f" to {self.lr * self.min_lr_ratio:.3g}" if self.decay in (Decay.linear, Decay.cosine) else ""
        return f"{warm}{self.decay.value.replace('_', ' ')}{to}"
