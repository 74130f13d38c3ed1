"""`parallel.layout=auto`: the layout whose own code, rehearsed for one layer, needs the least time.

Each layout attends to a pair of the longest sequences, forward and backward, on tensors without memory. The clock of
the rehearsal counts operators, kernel launches and the bytes that computing does not hide.
"""

from __future__ import annotations

import dataclasses

import torch

from rlexp.config.checks.kernel import tokens_of_rank
from rlexp.config.checks.layout import Choice, Heads, candidates, near
from rlexp.config.checks.reference import fits_reference
from rlexp.config.schema import Checkpointing, Config, Device, Precision
from rlexp.preflight.children import Calls, at_once
from rlexp.preflight.rehearsal.device import joined, rehearsed_device
from rlexp.preflight.rehearsal.kernel_cost import rehearsed_kernel
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.mode import Rehearsing
from rlexp.preflight.rehearsal.rates import DeviceClock, Rates
from rlexp.training.ring.kernels.base import Ask
from rlexp.training.ring.layouts import get_layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring, Traffic, Watcher, build_world

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32, Precision.fp64: torch.float64}


def fastest(cfg: Config, heads: Heads | None) -> Choice:
    """Choose the layout for a configuration with parallel.layout=auto."""
    return at_once([choosing(cfg, heads)])[0]


def choosing(cfg: Config, heads: Heads | None) -> Calls[Choice]:
    """Choose the layout in processes of their own: one that has rehearsed cannot rehearse a whole run."""
    possible = [each for each in candidates(cfg, heads) if fits_reference(cfg, each)]
    if len(possible) == 1:
        only = possible[0]
        reason = only.reason or "no other layout fits the models, the ring and the transport"
        return dataclasses.replace(only, reason=reason)
    assert heads is not None
    seconds = yield [(seconds_of, (cfg, heads, choice)) for choice in possible]
    ranked = sorted(zip(possible, seconds, strict=True), key=lambda item: item[1])
    best, least = ranked[0]
    ratios = ", ".join(f"{choice.name} {time / least:.2f}" for choice, time in ranked)
    where = "one node" if near(cfg, cfg.parallel.ring_size) else "several nodes"
    shape = f"{heads.queries} query heads, {heads.keys} key/value heads, {cfg.data.max_length:,} tokens"
    reason = f"{shape}, {where}; rehearsed: {ratios}"
    return dataclasses.replace(best, reason=reason)


def seconds_of(cfg: Config, heads: Heads, choice: Choice) -> float:
    """Rehearse attention over a layout; return the seconds of a layer, on average.

    They are those of the first or the last rank: one of them sends most.
    """
    windows = heads.windows_within(cfg.data.max_length)
    ranks = {0, cfg.parallel.ring_size - 1}
    of_kind = {window: max(_seconds_of_rank(rank, window, cfg, heads, choice) for rank in ranks)
               for window in dict.fromkeys(windows)}  # fmt: skip
    return sum(of_kind[window] for window in windows) / len(windows)


def _seconds_of_rank(rank: int, window: int | None, cfg: Config, heads: Heads, choice: Choice) -> float:
    device = rehearsed_device() if cfg.launch.device is Device.cuda else torch.device("cpu")
    ring_size, dtype = cfg.parallel.ring_size, DTYPES[cfg.train.precision]
    log = Log(device.type, clock=DeviceClock(Rates.of(cfg, ring_size)))
    with joined(rank, ring_size), (mode := Rehearsing(log)):
        ring = watched(build_world(ring_size, inner_size=choice.ulysses_size).ring, cfg, log, mode)
        layout = get_layout(*choice.how)
        length, multiple = cfg.data.max_length, layout.multiple(ring_size)
        segments = Segment(0, length, length), Segment(length, length, length + -2 * length % multiple)
        kernel = rehearsed_kernel(
            log, cfg.parallel.kernel.value, device.type, dtype, heads.size, Ask(1.0, window), tokens_of_rank(cfg),
            cfg.hardware.generation or None,
        )  # fmt: skip
        plan = layout.plan(segments, ring, kernel, window).to(device)
        tokens = len(layout.place(segments, ring_size).places[rank])
        q, k, v = (
            torch.empty(tokens, count, heads.size, device=device, dtype=dtype, requires_grad=True)
            for count in (heads.queries, heads.keys, heads.keys)
        )
        out = plan.attend(q, k, v, Ask(1.0, window))
        forward, launched = log.clock.now, log.counts.launching
        out.backward(torch.empty_like(out))
        both = log.counts
        log.enter("")  # waits for what is on its way
    again = 1 if cfg.memory.recomputed is Checkpointing.full else 0
    return max(log.clock.now + again * forward, both.launching + again * launched)


def watched(ring: Ring, cfg: Config, log: Log, mode: Rehearsing) -> Ring:
    """Return the ring with links of the right kind: inner rings may be on one node where the whole ring is not."""

    def over(part: Ring) -> Ring:
        return dataclasses.replace(part, traffic=Traffic(watcher=Link(log, Rates.of(cfg, part.size).link)))

    inner = over(ring.inner) if ring.inner is not None else None
    outer = dataclasses.replace(ring.outer, traffic=over(ring).traffic) if ring.outer is not None else None
    mode.watched = {part.group.group_name for part in (ring, inner, outer) if part is not None and part.group}
    return dataclasses.replace(over(ring), inner=inner, outer=outer)


@dataclasses.dataclass(frozen=True)
class Link(Watcher):
    """A watcher of a ring whose bytes travel at a rate of their own."""

    log: Log
    rate: float

    def leaving(self, size: int) -> float:
        return self.log.clock.send(size, self.rate)

    def awaited(self, ticket: float) -> None:
        self.log.awaited(ticket)
