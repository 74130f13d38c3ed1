"""Take from a pack the shard that one rank of the ring holds."""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.training.ring.base import Layout, RingBatch, Window
from rlexp.training.ring.kernels.base import BlockKernel
from rlexp.training.types import Pack, Shard
from rlexp.training.world.groups import Ring


def shard_pack(
    pack: Pack, ring: Ring, layout: Layout, kernel: BlockKernel, max_length: int, windows: Sequence[Window] = (None,)
) -> Shard:
    """`windows` are those of the model's layers: attention is planned once for each kind, work is the layers' mean."""
    deals = {window: layout.deal(pack.segments, ring.size, window) for window in dict.fromkeys(windows)}
    attention = RingBatch(layout, pack.segments, ring, kernel, max_length)
    for window in deals:
        attention.plan(window)
    deal = deals[windows[0]]
    work = [sum(deals[window].work[rank] for window in windows) / len(windows) for rank in range(ring.size)]
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
        most_work=max(work),
        mean_work=sum(work) / ring.size,
        attention=attention,
        ring=ring,
    )
