"""Run all ranks of a ring as threads of one process, to get their results and not their times.

The layouts' own code runs on every thread. Messages are copied and waited for, like transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.simulate import Sizes, collectives_of
from rlexp.training.ring.collectives import Posted
from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.ring.layouts import Layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

PATIENCE = 600.0  # seconds that a rank waits for another


@dataclass
class Letter:
    """A message under way, with the interface of the layouts' own types."""

    post: Post
    ring: Ring
    number: int  # of the ring's calls
    senders: tuple[int, ...]

    def parts(self) -> list[Tensor]:
        return [self.post.take(self.ring.ranks, self.number, sender) for sender in self.senders]


@dataclass
class Letters:
    """What some ranks send, with the interface of the transports' own type."""

    post: Post
    ring: Ring
    coming: Posted

    def wait(self) -> list[Tensor]:
        return [self.post.receive(self.ring, source, x) if x.numel() else x for source, x in self.coming]


class Gathered(Letter):
    def wait(self) -> list[Tensor]:
        return [torch.stack(self.parts())]


class Summed(Letter):
    def wait(self) -> list[Tensor]:
        return [torch.stack([part[self.ring.rank] for part in self.parts()]).sum(0)]


@dataclass
class Post:
    """Messages by the ring's ranks, the number of the call, and the sender. All ranks call in the same order."""

    sent: dict[tuple[tuple[int, ...], int, int], Tensor] = field(default_factory=dict)
    calls: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    letters: dict[tuple[tuple[int, ...], int, int], list[Tensor]] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    broken: bool = False

    def put(self, buffer: Tensor, ring: Ring) -> int:
        with self.arrived:
            number = self.calls[ring.ranks, ring.rank] = self.calls.get((ring.ranks, ring.rank), 0) + 1
            self.sent[ring.ranks, number, ring.rank] = buffer.clone()
            self.arrived.notify_all()
        return number

    def take(self, ranks: tuple[int, ...], number: int, sender: int) -> Tensor:
        key = (ranks, number, sender)
        with self.arrived:
            there = self.arrived.wait_for(lambda: self.broken or key in self.sent, PATIENCE)
            if self.broken or not there:
                raise RuntimeError(f"nothing came from rank {sender} of the ring {ranks}")
            return self.sent[key]

    def fail(self) -> None:
        with self.arrived:
            self.broken = True
            self.arrived.notify_all()

    def between(self, ring: Ring, going: Posted, coming: Posted) -> Letters:
        """Letters to one rank are numbered by themselves: not all ranks write to each other at every step."""
        for to, x in going:
            if x.numel():
                self.send(x, ring, to)
        return Letters(self, ring, coming)

    def send(self, x: Tensor, ring: Ring, to: int) -> None:
        with self.arrived:
            way = (ring.ranks, ring.rank, to)
            self.letters.setdefault(way, []).append(x.clone())
            self.arrived.notify_all()

    def receive(self, ring: Ring, source: int, like: Tensor) -> Tensor:
        way = (ring.ranks, source, ring.rank)
        with self.arrived:
            there = self.arrived.wait_for(lambda: self.broken or self.letters.get(way), PATIENCE)
            if self.broken or not there:
                raise RuntimeError(f"nothing came from rank {source} of the ring {ring.ranks}")
            received = self.letters[way].pop(0)
        assert (received.shape, received.dtype) == (like.shape, like.dtype), "the ranks disagree on what is sent"
        return received

    def gather(self, buffer: Tensor, ring: Ring) -> Letter:
        return Gathered(self, ring, self.put(buffer, ring), tuple(range(ring.size)))

    def sum_and_scatter(self, buffer: Tensor, ring: Ring) -> Letter:
        return Summed(self, ring, self.put(buffer, ring), tuple(range(ring.size)))

    def exchange(self, buffer: Tensor, ring: Ring) -> Tensor:
        number = self.put(buffer, ring)
        return torch.stack([self.take(ring.ranks, number, sender)[ring.rank] for sender in range(ring.size)])


def whole_ring(
    layout: Layout,
    segments: Sequence[Segment],
    ring_size: int,
    kernel: BlockKernel,
    sizes: Sizes,
    inputs: Sequence[Tensor],
    window: int | None = None,
) -> list[Tensor]:
    """Take q, k, v and the output's gradient of a whole pack; return the output, dq, dk and dv of the whole ring."""
    post, places = Post(), layout.place(segments, ring_size).places

    def of_rank(rank: int) -> list[Tensor]:
        try:
            ring = Ring(rank, tuple(range(ring_size)))
            plan = layout.plan(segments, ring, kernel, window).to(sizes.device)
            q, k, v, dout = (x[places[rank].to(sizes.device)] for x in inputs)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            # On this thread: autograd has one for each device, in which the ranks would wait for each other.
            with torch.autograd.set_multithreading_enabled(False):
                out = plan.attend(q, k, v, Ask(sizes.scale, window))
                return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
        except BaseException:
            post.fail()
            raise

    with collectives_of(post), ThreadPoolExecutor(ring_size) as pool:
        by_rank = list(pool.map(of_rank, range(ring_size)))
    index = torch.cat(places).argsort().to(sizes.device)
    return [torch.cat(parts)[index] for parts in zip(*by_rank, strict=True)]
