"""From a pack to what one rank of the ring holds of it."""

from __future__ import annotations

from rlexp.ring.attention import ring_batch
from rlexp.ring.groups import Ring
from rlexp.ring.kernels.base import BlockKernel
from rlexp.ring.layouts import Layout
from rlexp.types import Pack, Shard


def shard_pack(pack: Pack, ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int) -> Shard:
    deal = layout.deal(pack.segments, ring.size)
    index = deal.places[ring.rank]
    return Shard(
        pack.tokens_T[index],
        pack.targets_T[index],
        pack.positions_T[index],
        pack.sequence_T[index],
        index,
        pack.sequences,
        deal.real[ring.rank],
        max(deal.work),
        sum(deal.work) / ring.size,
        ring_batch(pack.segments, ring, layout, kernel, max_length),
    )
