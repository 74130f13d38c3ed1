"""Gather: every rank receives the rows of all ranks that any other rank sees, one key/value head at a time.

A rank attends to its own keys while the others' arrive, and then in one call to all that it sees of them: two calls and
one merge for each head, whatever the size of the ring. One gathered head is held at a time, and the next one is in
flight. The backward pass gathers again. Gradients are summed in float32 on their way home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlexp.training.ring.calls import Step, meet, needed_elsewhere
from rlexp.training.ring.collectives import Underway, gather, sum_and_scatter
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.ring.kernels.fused import add_keys
from rlexp.training.ring.placement import Placement
from rlexp.training.ring.selection import Selection, count, in_a_row, select
from rlexp.training.ring.slices import Slice
from rlexp.training.ring.transports.base import Arrived, Home, KeyGrads, Transport
from rlexp.training.world.groups import Ring


@dataclass(frozen=True)
class Gather(Transport):
    ring: Ring
    own: Selection  # rows of our shard that another rank needs
    most: int  # such rows of any rank

    def keys(self, k_tGD: Tensor, v_tGD: Tensor) -> Iterator[Arrived]:
        own, size = self.own, k_tGD.shape[2]
        going = k_tGD.new_zeros(k_tGD.shape[1], self.most, size + v_tGD.shape[2])
        going[:, : own.count, :size] = select(k_tGD, own.index).transpose(0, 1)
        going[:, : own.count, size:] = select(v_tGD, own.index).transpose(0, 1)
        coming = gather(going[0], self.ring) if self.most else None
        for head in range(len(going)):
            arriving, heads = coming, slice(head, head + 1)
            if self.most and head + 1 < len(going):
                coming = gather(going[head + 1], self.ring)
            yield Arrived(heads, 0, k_tGD[:, heads], v_tGD[:, heads])
            if arriving is not None:
                both = arriving.wait()[0].flatten(0, 1).unsqueeze(1)
                yield Arrived(heads, 1, both[..., :size], both[..., size:])
                del both

    def home(self, k_tGD: Tensor, v_tGD: Tensor, kernel: BlockKernel) -> Home:  # noqa: ARG002
        return ScatteredHome(self, k_tGD, v_tGD)

    def to(self, device: torch.device) -> Gather:
        return replace(self, own=self.own.to(device))


class ScatteredHome(Home):
    def __init__(self, way: Gather, k_tGD: Tensor, v_tGD: Tensor) -> None:
        super().__init__(k_tGD, v_tGD)
        self.way, self.sizes = way, (k_tGD.shape[2], v_tGD.shape[2])
        self.going: tuple[slice, Underway] | None = None

    def add(self, heads: slice, step: int, grads: Sequence[KeyGrads]) -> None:
        if step == 0:
            for call, dk, dv in grads:
                self.keep(call.keys.index, dk, dv, heads, once=call.once)
            return
        spread = self.like[0].new_zeros(self.way.ring.size, self.way.most, sum(self.sizes), dtype=self.wide)
        into_k, into_v = spread.flatten(0, 1).unsqueeze(1).split(self.sizes, dim=-1)
        for call, dk, dv in grads:
            add_keys(into_k, into_v, call.keys.index, dk, dv, once=call.once)
        self.wait()  # one at a time: the spread gradient is as long as the whole pack
        self.going = (heads, sum_and_scatter(spread, self.way.ring))

    def wait(self) -> None:
        if self.going is not None:
            (heads, going), self.going = self.going, None
            dk, dv = going.wait()[0][: self.way.own.count].unsqueeze(1).split(self.sizes, dim=-1)
            self.keep(self.way.own.index, dk, dv, heads)


def gathered(slices: Sequence[Slice], placement: Placement, ring: Ring) -> tuple[Gather, list[Step]]:
    rows = [needed_elsewhere(slices, placement, rank) for rank in range(ring.size)]
    most, others = max(map(count, rows)), [rank for rank in range(ring.size) if rank != ring.rank]
    first = ring.rank * placement.share
    own = meet(slices, placement, ring.rank, ring.rank), [(range(first, first + placement.share), 0)]
    lying = [each for rank in others for each in in_a_row(rows[rank], rank * most)]
    steps = [own, (meet(slices, placement, ring.rank, *others), lying)]
    return Gather(ring, Selection((placement.own(rows[ring.rank], ring.rank),)), most), steps
