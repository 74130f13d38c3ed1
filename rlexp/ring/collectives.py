"""Collectives of a ring: the differentiable sum, and the rotation of a buffer to the next rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.ring.groups import Ring


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
            dist.all_reduce(total, group=ring.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def ring_sum(values: Tensor, ring: Ring) -> Tensor:
    result: Tensor = _RingSum.apply(values, ring)
    return result


@dataclass
class Rotation:
    """A buffer on its way to the next rank while another comes in. `sent` is kept alive until both are done."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def rotate(buffer: Tensor, ring: Ring) -> Rotation:
    """Start sending `buffer` to the next rank and receiving the previous rank's."""
    assert ring.size > 1
    assert buffer.is_contiguous()
    received = torch.empty_like(buffer)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, buffer, ring.next_rank, ring.group),
            dist.P2POp(dist.irecv, received, ring.previous_rank, ring.group),
        ]
    )
    ring.traffic.sent += buffer.numel() * buffer.element_size()
    return Rotation(buffer, received, works)
