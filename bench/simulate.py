"""Run one rank of a ring alone: the layout's own code at that rank's own shapes, with simulated other ranks.

Messages of the other ranks are drawn from a seed into the buffers that a transfer would fill, while the clock is
stopped. So time and memory are those of a real rank, but the numbers are not; bench.together computes those.

A rank's work is recorded piece by piece, from one collective call to the next. A ring works step by step: a step ends
where a rank waits for a message sent in that step, and all ranks wait for the slowest. A message sent in an earlier
step has arrived during the computation, as far as the link's bandwidth allows.

Shape letters: T tokens of the pack, t tokens of one rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlexp.training.ring.collectives import Posted
from rlexp.training.ring.kernels.base import Ask, BlockKernel, Call
from rlexp.training.ring.layouts import Layout
from rlexp.training.ring.selection import Selection
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

EVERYWHERE = math.inf  # bytes a second of a link that takes no time


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def scale(self) -> float:
        return self.size**-0.5

    def drawn(self, tokens: int, seed: int = 0) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator(self.device).manual_seed(seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.empty(tokens, each, self.size, dtype=self.dtype, device=self.device).normal_(generator=generator)
            for each in heads
        ]


def packed(lengths: Sequence[int], multiple: int, spare: int = 0) -> list[Segment]:
    """Sequences laid end to end like a pack, the last one padded."""
    segments, start = [], 0
    for number, length in enumerate(lengths):
        padded = length + (-sum(lengths) % multiple + spare if number == len(lengths) - 1 else 0)
        segments.append(Segment(start, length, padded))
        start += padded
    return segments


def call_of(q_lengths: Sequence[int], k_lengths: Sequence[int], *how: Any) -> Call:
    """A call of a kernel, whose queries and keys lie segment by segment."""
    ends = (itertools.pairwise(itertools.accumulate(lengths, initial=0)) for lengths in (q_lengths, k_lengths))
    queries, keys = (Selection(tuple((range(*each),) for each in pairs)) for pairs in ends)
    return Call(queries, keys, *how)


# ---- A rank's work, piece by piece ----


@dataclass(frozen=True)
class Piece:
    """A rank's computation up to a collective call, or to the end of a pass."""

    seconds: float
    kind: str  # of the collective: between, gather, scatter, exchange; "" at the end of a pass
    message: int | None  # sent here if there are bytes, otherwise waited for
    nbytes: int | None  # sent by this rank; None when it waits
    ends_step: bool


Steps = list[list[Piece]]


@dataclass(frozen=True)
class Trace:
    """Both passes of a rank, step by step."""

    forward: Steps
    backward: Steps

    @property
    def steps(self) -> Steps:
        return self.forward + self.backward

    def seconds(self) -> float:
        return sum(piece.seconds for step in self.steps for piece in step)

    def sent(self) -> int:
        return sum(piece.nbytes or 0 for step in self.steps for piece in step)


def in_ring(ranks: Sequence[Steps], links: Mapping[str, float] | None = None) -> float:
    """Seconds of a ring whose ranks are these: step by step those of the slowest.

    `links` says how many bytes a second a kind of collective moves out of a rank; without it, sending takes no time. A
    link sends one message after the other, as soon as it is given, while its rank goes on.
    """
    now = free = 0.0
    arrival: dict[int | None, float] = {}
    for step in zip(*ranks, strict=True):
        for piece in max(step, key=lambda pieces: sum(piece.seconds for piece in pieces)):
            now += piece.seconds
            if piece.nbytes is not None:
                free = max(now, free) + piece.nbytes / (links[piece.kind] if links else EVERYWHERE)
                arrival[piece.message] = free
            elif piece.message is not None:
                now = max(now, arrival[piece.message])
    return now


# ---- The clock ----


class Clock:
    """Marks on the device's own time line, and the seconds between them once it has come to them. On CPU they are this
    thread's own seconds, whoever else has the cores: torch must have one thread."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" or torch.get_num_threads() == 1
        self.device = device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timed(work: Callable[[], object], clock: Clock, repeats: int, combine: Callable[[list[float]], float]) -> float:
    """Time `work` several times, after one run that does not count."""
    marks = []
    for _ in range(repeats + 1):
        begin = clock.mark()
        work()
        marks.append((begin, clock.mark()))
    clock.wait()
    return combine([clock.seconds(*pair) for pair in marks[1:]])


# ---- The other ranks, played ----


# Two marks, and what a piece says of its end.
Noted = tuple[Any, Any, str, int | None, int | None, bool]


@dataclass
class Played:
    """Stands in for a message under way, with the interface of the layouts' own types."""

    others: Others
    kind: str
    message: int
    sent: Sequence[Tensor]
    received: list[Tensor]
    step: int

    def wait(self) -> list[Tensor]:
        # All ranks of a ring take part in every step; who gathers waits only for what is not there yet.
        ends = self.kind == "between" and self.step == self.others.step
        self.others.note(self.kind, self.message, None, ends)
        received = self.received
        del self.sent, self.received
        return received


@dataclass
class Others:
    """The collectives of a ring in which only one rank exists."""

    clock: Clock
    generator: torch.Generator
    noted: list[Noted] = field(default_factory=list)
    step: int = 0
    _since: Any = None
    _messages: int = 0

    def begin(self) -> None:
        self._since = self.clock.mark()

    def note(self, kind: str, message: int | None, nbytes: int | None, ends_step: bool) -> None:
        self.noted.append((self._since, self.clock.mark(), kind, message, nbytes, ends_step))
        self.step += ends_step
        self.begin()

    def end(self) -> None:
        self.note("", None, None, ends_step=True)

    def _send(self, kind: str, sent: Sequence[Tensor], received: list[Tensor], nbytes: int) -> Played:
        message = self._messages = self._messages + 1
        self.note(kind, message, nbytes, ends_step=False)
        for each in received:
            if self.clock.device.type == "cpu":
                each.copy_(_numbers(each.numel(), each.dtype).view_as(each))
            else:
                each.normal_(generator=self.generator)
        self.begin()  # that is not counted
        return Played(self, kind, message, sent, received, self.step)

    def between(self, ring: Ring, going: Posted, coming: Posted) -> Played:  # noqa: ARG002
        assert all(x.is_contiguous() for _, x in going)
        sent = [x for _, x in going]
        return self._send("between", sent, [x for _, x in coming], sum(x.nbytes for x in sent))

    def gather(self, buffer: Tensor, ring: Ring) -> Played:
        gathered = buffer.new_empty(ring.size, *buffer.shape)
        return self._send("gather", [buffer], [gathered], (ring.size - 1) * buffer.nbytes)

    def sum_and_scatter(self, buffer: Tensor, ring: Ring) -> Played:
        return self._send("scatter", [buffer], [torch.empty_like(buffer[0])], (ring.size - 1) * buffer[0].nbytes)

    def exchange(self, buffer: Tensor, ring: Ring) -> Tensor:
        if ring.size == 1:
            return buffer
        buffer = buffer.contiguous()
        played = self._send("exchange", [buffer], [torch.empty_like(buffer)], (ring.size - 1) * buffer[0].nbytes)
        self.note("exchange", played.message, None, ends_step=True)
        return played.received[0]


@functools.cache
def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Draw random numbers once: drawing them each time would take a third of the time on a core."""
    return torch.empty(count, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def collectives_of(others: Any) -> Iterator[None]:
    """Replace the real collectives in every layout."""
    with (
        mock.patch("rlexp.training.ring.transports.travel.between", others.between),
        mock.patch("rlexp.training.ring.transports.gather.gather", others.gather),
        mock.patch("rlexp.training.ring.transports.gather.sum_and_scatter", others.sum_and_scatter),
        mock.patch("rlexp.training.ring.transports.heads.exchange", others.exchange),
    ):
        yield


class Alone:
    """A rank that runs alone, as often as asked; the first time does not count."""

    def __init__(
        self,
        layout: Layout,
        segments: Sequence[Segment],
        ring_size: int,
        rank: int,
        kernel: BlockKernel,
        sizes: Sizes,
    ) -> None:
        ring = Ring(rank, tuple(range(ring_size)))
        self.sizes, self.clock = sizes, Clock(sizes.device)
        self.plan = layout.plan(segments, ring, kernel).to(sizes.device)
        *inputs, self.dout = sizes.drawn(len(layout.place(segments, ring_size).places[rank]), seed=rank)
        self.inputs = [tensor.requires_grad_() for tensor in inputs]
        self.runs: list[list[Noted]] = []
        self.passed = 0  # pieces of the forward pass

    def play(self) -> None:
        others = Others(self.clock, torch.Generator(self.sizes.device).manual_seed(1000 + len(self.runs)))
        q, k, v = self.inputs
        # A backward pass on this thread: one of autograd's own would come between the marks.
        with collectives_of(others), torch.autograd.set_multithreading_enabled(False):
            others.begin()
            out = self.plan.attend(q, k, v, Ask(self.sizes.scale))
            others.end()
            self.passed = len(others.noted)
            torch.autograd.grad(out, (q, k, v), self.dout)
            others.end()
        self.runs.append(others.noted)

    def trace(self, combine: Callable[[list[float]], float] = min) -> Trace:
        """The trace whose pieces are the shortest of the runs, or combined by `combine`."""
        self.clock.wait()
        pieces = [
            Piece(combine([self.clock.seconds(*each[:2]) for each in same[1:]]), *same[0][2:])
            for same in zip(*self.runs, strict=True)
        ]
        return Trace(_steps(pieces[: self.passed]), _steps(pieces[self.passed :]))


def _steps(pieces: Sequence[Piece]) -> Steps:
    steps: Steps = [[]]
    for piece in pieces:
        steps[-1].append(piece)
        if piece.ends_step:
            steps.append([])
    return steps[:-1]
