"""Take from a pack the shard that one rank of the ring holds."""

from __future__ import annotations

from rlexp.training.ring.base import Layout, RingBatch
from rlexp.training.ring.groups import Ring
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.types import Pack, Shard


def shard_pack(pack: Pack, ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int) -> Shard:
    if any(segment.parent is not None for segment in pack.segments):
        # The types carry the forest. The kernel call for a child's block over its parent does not exist yet.
        raise NotImplementedError("segments with a parent are not attended to yet")
    deal = layout.deal(pack.segments, ring.size)
    index = deal.places[ring.rank]
    sequence_t = pack.sequence_T[index]
    return Shard(
        tokens_t=pack.tokens_T[index],
        targets_t=pack.targets_T[index],
        positions_t=pack.positions_T[index],
        sequence_t=sequence_t,
        trained_n=(sequence_t >= 0).nonzero().squeeze(-1),
        index_t=index,
        sequences=pack.sequences,
        real_tokens=deal.real[ring.rank],
        most_work=max(deal.work),
        mean_work=sum(deal.work) / ring.size,
        attention=RingBatch(layout.plan(pack.segments, ring, kernel), max_length),
    )
