"""Reduce whole gradients over all ranks while the backward pass goes on, for engines that keep them whole.

Every rank sends the same buckets in the same order, the reverse of the parameters', whatever the order in which its
gradients come. So no two ranks wait for each other crosswise, and the sums do not depend on timing.

A ring's messages go over another communicator, and NCCL wants both in the same order on all ranks. The order of a
backward pass is that of its graph, which is the same on all ranks. Only a rank that lacks a gradient would send later
than the others, so a model in which that happens is reduced after the backward pass.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlexp.training.world.groups import World

BUCKET = 1 << 25  # elements reduced in one collective; a larger parameter is one of its own
IN_FLIGHT = 2


class Reducing:
    """The mean over the ranks of the gradients of these parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, *, at_the_end: bool = False) -> None:
        self.world, self.at_the_end = world, at_the_end
        self._buckets = list(_buckets(parameters))
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._missing: list[int] = []  # gradients that a bucket waits for; empty outside a pass that reduces
        self._next = 0
        self._sent: deque[tuple[Sequence[nn.Parameter], Tensor, dist.Work]] = deque()

    @contextlib.contextmanager
    def during(self, *, last: bool) -> Iterator[None]:
        """Reduce during the backward pass inside, or after it, if it is the step's last. A collective call."""
        if not last or self.world.size == 1:
            yield
            if last:
                self._fill()
            return
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0
        try:
            yield
            self._fill()
            self._missing = [0] * len(self._buckets)
            self._send_complete()
            while self._sent:
                self._land()
        finally:
            self._missing = []
            self._sent.clear()

    def arrived(self, parameter: nn.Parameter) -> None:
        """Take note that a parameter's gradient is complete in this pass."""
        if self._missing and not self.at_the_end:
            self._missing[self._bucket_of[id(parameter)]] -= 1
            self._send_complete()

    def _fill(self) -> None:
        """Give every parameter a gradient: one without a gradient here may have one on another rank."""
        for bucket in self._buckets[self._next :]:
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _send_complete(self) -> None:
        while self._next < len(self._buckets) and not self._missing[self._next]:
            if len(self._sent) == IN_FLIGHT:
                self._land()
            bucket = self._buckets[self._next]
            grads = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = grads[0].view(-1) if len(grads) == 1 else torch.cat([grad.reshape(-1) for grad in grads])
            work = dist.all_reduce(flat, async_op=True)
            assert work is not None, "every rank is in the world"
            self._sent.append((bucket, flat, work))
            self._next += 1

    def _land(self) -> None:
        bucket, flat, work = self._sent.popleft()
        work.wait()
        flat /= self.world.size
        if len(bucket) > 1:
            for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(piece.view_as(parameter.grad))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
