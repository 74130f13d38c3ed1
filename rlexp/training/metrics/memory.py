"""Memory peaks by phase: the allocator's on CUDA; on CPU the resident set's, and beside it the live tensors'.

The resident set is the process's. For a small model it is the size of the libraries, on every ring.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlexp.base.errors import OutOfMemory, is_out_of_memory
from rlexp.launch.rank_progress import BETWEEN, seen
from rlexp.training.metrics.live_tensors import TensorCount
from rlexp.training.metrics.meter import Meter

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size
REMEDY = (
    "A larger parallel.ring_size, a smaller train.micro_batch_size or train.max_tokens_per_micro_batch, or "
    "memory.checkpointing=true need less."
)
REMEDIES = {
    "rollout": "A smaller rollout.micro_batch_size, or rollout.micro_batch_tokens=N, needs less.",
    "score": "A larger parallel.ring_size or a smaller rollout.score_batch_size needs less.",
}


class Phases:
    """The memory peak of each phase of a step, on this rank. `tell` is called when a phase begins.

    With a `count` there is also the peak of live tensors, for the phases in which they were counted.
    """

    def __init__(
        self, device: torch.device, tell: Callable[..., None] | None = None, count: TensorCount | None = None
    ) -> None:
        self._device = device
        self._tell = tell or (lambda **_facts: None)
        self._count = count
        self._peaks: dict[str, int] = {}
        self._highest: dict[str, int] = {}  # over all steps
        self._tensors: dict[str, int] = {}
        self._highest_tensors: dict[str, int] = {}
        self._step = 0
        self._phase = ""
        self._packs: Sequence[int] = ()  # the tokens of each of the step's micro-batches, once they are known
        self._place = 0  # of the one at hand; after the last their number
        self._within_pack = False
        self._began = 0.0  # when the first began
        self._pace: float | None = None  # seconds that a token took in the last step
        self.watch: Callable[[dict[str, Any]], None] = lambda _facts: None  # called with what is told

    def begin(self, step: int) -> None:
        self._step, self._packs, self._place = step, (), 0
        self._peaks.clear()
        self._tensors.clear()
        if self._count is not None:
            self._count.begin()

    def choose(self, sizes: Sequence[int]) -> None:
        """Say how many tokens each of the step's micro-batches has."""
        if not self._packs:
            self._packs, self._began = sizes, time.time()
        if self._count is not None:
            self._count.choose(sizes)

    def throughout(self) -> contextlib.AbstractContextManager[None]:
        """Stand around a rank's whole life."""
        return contextlib.nullcontext() if self._count is None else self._count.throughout()

    @contextlib.contextmanager
    def micro_batch(self, place: int) -> Iterator[None]:
        """Stand around all that is done for a micro-batch. The next one is loaded within it."""
        within, self._within_pack, before = self._within_pack, True, self._place
        self._place = place
        with contextlib.nullcontext() if self._count is None else self._count.micro_batch(place):
            yield
        self._within_pack, self._place = within, before if within else place + 1

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure a phase. A phase inside another counts as part of it. After an exception it stays the current one."""
        if self._phase:
            yield
            return
        self._phase = phase
        self._say(phase)
        with contextlib.nullcontext() if self._count is None else self._count.phase(phase):
            reset_peak(self._device)
            if self._count is not None:
                self._count.reset_peak()
            try:
                yield
            finally:
                self._note(phase)
        self._phase = ""

    def _note(self, phase: str) -> None:
        _raise(phase, peak_bytes(self._device), self._peaks, self._highest)
        if self._count is not None and self._count.on:
            _raise(phase, self._count.peak, self._tensors, self._highest_tensors)

    def _say(self, phase: str, **more: str) -> None:
        tensors = {"tensors": self._highest_tensors} if self._highest_tensors else {}
        facts = {"step": self._step, "phase": phase, **self._within(), "peaks": self._highest, **tensors, **more}
        self._tell(**facts)
        self.watch(facts)

    def _within(self) -> dict[str, Any]:
        """Return how far the step has come, once its micro-batches are known."""
        if not self._packs:
            return {}
        done, whole, pace = sum(self._packs[: self._place]), sum(self._packs), self._pace
        if pace is None and done:
            pace = (time.time() - self._began) / done
        packs = len(self._packs)
        return {"pack": min(self._place + 1, packs), "packs": packs, "tokens": done, "of_tokens": whole,
                "began": self._began, "pace": pace}  # fmt: skip

    def report(self, meter: Meter) -> None:
        """Add the step's peaks to the meter, whose reduction finds the largest over the ranks and its rank."""
        for phase, peak in self._peaks.items():
            meter.add_max(f"{phase}_peak", peak)
        meter.add_max("peak", max(self._peaks.values()))
        if self._count is not None:  # each rank chooses what it counts, and all give the same names
            tensors = self._tensors if self._count.always else self._highest_tensors  # so far, where not all is counted
            for phase in self._peaks:
                meter.add_max(f"{phase}_tensors_peak", tensors.get(phase, -math.inf))
            meter.add_max("tensors_peak", max(tensors.values(), default=-math.inf))
        if tokens := sum(self._packs):
            self._pace = (time.time() - self._began) / tokens
        self._packs = ()
        self._say(BETWEEN)

    @contextlib.contextmanager
    def between(self, what: str) -> Iterator[None]:
        """Stand around what is done between two steps and is not measured: `save`, `export`. Who dies in it is said to
        have died there."""
        self._say(what)
        yield
        self._say(BETWEEN)

    def explained(self, error: BaseException, rank: int) -> OutOfMemory | None:
        """Return the error to show for a failed allocation; None for any other error."""
        if not is_out_of_memory(error):
            return None
        self._say(self._phase, died="out of memory")
        phase = self._phase or (BETWEEN if self._step else "build")
        where = seen({"step": self._step, "phase": phase, **(self._within() if self._within_pack else {})})
        peaks = ", ".join(self._shown(phase, peak) for phase, peak in self._highest.items()) or "none yet"
        first = str(error).strip().partition("\n")[0]
        return OutOfMemory(
            f"rank {rank} ran out of memory {where} ({first}). "
            f"Peaks so far: {peaks}. {REMEDIES.get(self._phase, REMEDY)}"
        )

    def _shown(self, phase: str, peak: int) -> str:
        tensors = self._highest_tensors.get(phase)
        return f"{phase} {peak / 1e9:.3g} GB" + (f" ({tensors / 1e9:.3g} GB of tensors)" if tensors else "")


def _raise(phase: str, peak: int, *peaks: dict[str, int]) -> None:
    for each in peaks:
        each[phase] = max(peak, each.get(phase, 0))


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        with contextlib.suppress(OSError):  # a container may forbid it: peaks are then those of the process so far
            _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
