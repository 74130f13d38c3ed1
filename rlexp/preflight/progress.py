"""What preflight does, while it does it: a line now and then on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rlexp.base.durations import duration
from rlexp.base.printable import fitted
from rlexp.preflight.children import Call
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan

EVERY = 5.0  # seconds between two lines


class Progress:
    """Says what is rehearsed. It is asked at least once a second, and seldom has something to say."""

    def __init__(self, since: float) -> None:
        self.since = self.last = since

    def __call__(self, running: Sequence[Call], done: int) -> None:
        now = time.monotonic()
        if now - self.last < EVERY:
            return
        self.last = now
        line = f"rehearses {doing(running)}; {done} done, {duration(now - self.since)} so far"
        sys.stderr.write(fitted(f"rlexp preflight: {line}\n", sys.stderr))
        sys.stderr.flush()


def doing(running: Sequence[Call]) -> str:
    """Name the calls that run, the first of each kind."""
    return ", and ".join(dict.fromkeys(map(named_call, running)))


def named_call(call: Call) -> str:
    _, args = call
    plan = next((each for each in args if isinstance(each, RehearsalPlan)), None)
    if plan is None:
        return "other rings"
    cfg = plan.cfg
    layers = "all layers" if plan.layers is None else f"{plan.layers} layers"
    return f"{cfg.engine.name.value}, a ring of {cfg.parallel.ring_size}, {cfg.data.max_length:,} tokens ({layers})"
