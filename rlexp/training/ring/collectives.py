"""Collectives of a ring: the differentiable sum, and what transports send: to a rank, to all, and heads for tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch import watch
from rlexp.training.world.groups import Ring


class _RingSum(torch.autograd.Function):
    """Sum over the ring, with the identity as its backward.

    Every rank of the ring computes the same loss from the sum. The gradient of *that one* loss with respect to a
    rank's own summand is the incoming gradient itself; `torch.distributed.nn.functional.all_reduce` would add it
    up once per rank and be wrong by the ring size.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, ring: Ring) -> Tensor:  # noqa: ARG004
        total = values.clone()
        if ring.size > 1:
            with ring.traffic.waiting():
                dist.all_reduce(total, group=_group(ring))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _group(ring: Ring) -> dist.ProcessGroup:
    """Return the ring's group. Without one torch would take the whole world's, and buffers would reach wrong ranks."""
    assert ring.group is not None, f"the ring of the ranks {ring.ranks} has no group: nothing can be sent over it"
    return ring.group


def ring_sum(values: Tensor, ring: Ring) -> Tensor:
    return _RingSum.apply(values, ring)


Waiting = Callable[[], contextlib.AbstractContextManager[None]]
Posted = Sequence[tuple[int, Tensor]]  # places in the ring, and what goes there or comes from there


@dataclass
class Underway:
    """Tensors on their way to other ranks while others come in.

    All are kept alive until they have arrived, and no longer: the received ones are handed over once.
    """

    sent: Sequence[Tensor]
    received: list[Tensor]
    works: Sequence[dist.Work]
    waiting: Waiting = contextlib.nullcontext

    def wait(self) -> list[Tensor]:
        with self.waiting():
            for work in self.works:
                work.wait()
        received = self.received
        del self.sent, self.received, self.works, self.waiting
        return received


def between(ring: Ring, going: Posted, coming: Posted) -> Underway:
    """Start sending tensors to ranks of the ring, and receiving others into the ones given. Empty ones stay.

    The watch learns that this rank has begun, also where nothing is to be sent: one that hangs before is behind the
    others, of which each notes the same number of calls.
    """
    sent, received = ([x for _, x in posted] for posted in (going, coming))
    assert all(x.is_contiguous() for x in (*sent, *received))
    operations = [dist.P2POp(dist.isend, x, ring.ranks[to], _group(ring)) for to, x in going if x.numel()]
    operations += [dist.P2POp(dist.irecv, x, ring.ranks[source], _group(ring)) for source, x in coming if x.numel()]
    works = dist.batch_isend_irecv(operations) if operations else []
    watch.note()
    if not operations:
        return Underway(sent, received, works)
    return Underway(sent, received, works, _leaving(ring, sum(x.nbytes for x in sent)))


def _leaving(ring: Ring, size: int) -> Waiting:
    """Count bytes that are sent, and return within what this rank waits for them."""
    return functools.partial(ring.traffic.waiting, ring.traffic.send(size))


# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(buffer: Tensor, ring: Ring) -> Underway:
    """Start sending `buffer` to all ranks and receiving theirs: (ring, …), in ring order."""
    assert buffer.is_contiguous()
    received = buffer.new_empty(ring.size, *buffer.shape)
    work = _all_gather(received.view(-1), buffer.view(-1), group=_group(ring), async_op=True)
    watch.note()
    return Underway([buffer], [received], [work], _leaving(ring, (ring.size - 1) * buffer.nbytes))


def sum_and_scatter(buffer: Tensor, ring: Ring) -> Underway:
    """Start summing the buffers of all ranks, (ring, …): each rank receives the sum of its own entry."""
    assert buffer.is_contiguous()
    assert len(buffer) == ring.size
    received = torch.empty_like(buffer[0])
    work = _reduce_scatter(received.view(-1), buffer.view(-1), group=_group(ring), async_op=True)
    watch.note()
    return Underway([buffer], [received], [work], _leaving(ring, (ring.size - 1) * received.nbytes))


def exchange(buffer: Tensor, ring: Ring) -> Tensor:
    """Send entry r of (ring, …) to rank r; entry r of the result came from rank r."""
    assert len(buffer) == ring.size
    assert buffer.is_contiguous()
    if ring.size == 1:
        return buffer
    received = torch.empty_like(buffer)
    work = dist.all_to_all_single(received, buffer, group=_group(ring), async_op=True)
    watch.note()
    return Underway([buffer], [received], [work], _leaving(ring, (ring.size - 1) * buffer[0].nbytes)).wait()[0]
