"""Where a run counts its live tensors: all the time, or where it may hold more than before.

Counting costs a call of Python for each operator, 9 µs. For a small model that is as long as the operator itself, so
that counting all of a step doubles its time; leaving out operators that return views would not help, since the call is
what costs. But a micro-batch hardly holds more than another unless it has more tokens, or more is held beside it:
gradients from the second micro-batch on, the optimizer's state from the second step on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from rlexp.training.metrics.live_tensors import LiveTensors

OF_MICRO_BATCHES = ("data", "forward", "reference", "backward")  # phases that are counted with their micro-batch
OF_STEPS = ("collect", "optimizer")  # phases that are counted in a step of which a micro-batch is counted


class TensorCount:
    """The live tensors of this rank, counted `always`, or in chosen parts of a run.

    These parts are: in each step with more tokens in a micro-batch than any step counted before, its first, largest and
    last micro-batch, the optimizer, and the pass that collects values for a loss of the whole batch; and the first time
    of each other phase, such as a rollout. From the second step on they are chosen anew, since the optimizer then has
    its state.
    """

    def __init__(self, device: torch.device, *, always: bool) -> None:
        self.always = always
        self.on = False
        self._live = LiveTensors(lasting=True)
        self._held = self._live.held(device.type)
        self._steps = 0
        self._missed = False  # a step was not counted
        self._largest = -1  # tokens of a micro-batch, over the steps that were counted
        self._chosen: set[int] = set()  # micro-batches of this step, by place
        self._once: set[str] = set()  # phases that have been counted

    @property
    def peak(self) -> int:
        return self._held.peak

    def reset_peak(self) -> None:
        self._live.reset_peaks()

    def begin(self) -> None:
        """Begin a step."""
        self._missed |= self._steps > 0 and not self._chosen
        self._steps += 1
        self._chosen = set()
        if self._steps == 1:
            self._live.find()
        if self._steps == 2:
            self._largest = -1
            self._once.clear()

    def choose(self, sizes: Sequence[int]) -> None:
        """Choose from the step's micro-batches, whose tokens are given.

        What was made in an uncounted step is found first: ZeRO-3 gathers its small weights anew in every step, and
        would hold them uncounted.
        """
        largest = max(sizes, default=-1)
        if largest > self._largest:
            if self._missed:
                self._live.find()
            self._missed = False
            self._largest = largest
            self._chosen = {0, sizes.index(largest), len(sizes) - 1}

    def throughout(self) -> contextlib.AbstractContextManager[None]:
        return self._here(self.always)

    def micro_batch(self, place: int) -> contextlib.AbstractContextManager[None]:
        return self._here(place in self._chosen)

    def phase(self, phase: str) -> contextlib.AbstractContextManager[None]:
        if phase in OF_STEPS:
            counted = bool(self._chosen)
        elif phase in OF_MICRO_BATCHES:
            counted = False
        else:
            counted = self._steps > 0 and phase not in self._once
            self._once.add(phase)
        return self._here(counted)

    @contextlib.contextmanager
    def _here(self, counted: bool) -> Iterator[None]:
        if self.on or not counted:
            yield
            return
        self.on = True
        try:
            with self._live:
                yield
        finally:
            self.on = False
