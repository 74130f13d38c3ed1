"""Collectives of a ring: the differentiable sum, and what layouts send: rotation, gather, scatter and exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.training.ring.groups import Ring


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
    result: Tensor = _RingSum.apply(values, ring)
    return result


@dataclass
class Rotation:
    """A buffer on its way to the next rank while another comes in.

    Both are kept alive until they have arrived, and no longer: the received one is handed over once.
    """

    sent: Tensor
    received: Tensor
    works: list[dist.Work]
    arrived: Callable[[], None]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.arrived()
        received = self.received
        del self.sent, self.received, self.works, self.arrived
        return received


def rotate(buffer: Tensor, ring: Ring) -> Rotation:
    """Start sending `buffer` to the next rank and receiving the previous rank's."""
    assert ring.size > 1
    assert buffer.is_contiguous()
    received = torch.empty_like(buffer)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, buffer, ring.next_rank, _group(ring)),
            dist.P2POp(dist.irecv, received, ring.previous_rank, _group(ring)),
        ]
    )
    return Rotation(buffer, received, works, _leaving(ring, buffer.nbytes))


def _leaving(ring: Ring, size: int) -> Callable[[], None]:
    """Count bytes that are sent, and return what to call when this rank has waited for them."""
    return functools.partial(ring.traffic.arrived, ring.traffic.send(size))


# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Pending:
    """The result of a collective that is in flight. As in a rotation, it is handed over once."""

    sent: Tensor
    received: Tensor
    work: dist.Work | None
    arrived: Callable[[], None] | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        if self.arrived is not None:
            self.arrived()
        received = self.received
        del self.sent, self.received, self.work
        return received


def gather(buffer: Tensor, ring: Ring) -> Pending:
    """Start sending `buffer` to all ranks and receiving theirs: (ring, …), in ring order."""
    assert buffer.is_contiguous()
    if ring.size == 1:
        return Pending(buffer, buffer.unsqueeze(0), None)
    received = buffer.new_empty(ring.size, *buffer.shape)
    work = _all_gather(received.view(-1), buffer.view(-1), group=_group(ring), async_op=True)
    return Pending(buffer, received, work, _leaving(ring, (ring.size - 1) * buffer.nbytes))


def sum_and_scatter(buffer: Tensor, ring: Ring) -> Pending:
    """Start summing the buffers of all ranks, (ring, …): each rank receives the sum of its own entry."""
    assert buffer.is_contiguous()
    assert len(buffer) == ring.size
    if ring.size == 1:
        return Pending(buffer, buffer[0], None)
    received = torch.empty_like(buffer[0])
    work = _reduce_scatter(received.view(-1), buffer.view(-1), group=_group(ring), async_op=True)
    return Pending(buffer, received, work, _leaving(ring, (ring.size - 1) * received.nbytes))


def exchange(buffer: Tensor, ring: Ring) -> Tensor:
    """Send entry r of (ring, …) to rank r; entry r of the result came from rank r."""
    assert len(buffer) == ring.size
    assert buffer.is_contiguous()
    if ring.size == 1:
        return buffer
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer, group=_group(ring))
    _leaving(ring, (ring.size - 1) * buffer[0].nbytes)()
    return received
