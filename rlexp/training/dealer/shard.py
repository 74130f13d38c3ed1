"""Take from a pack the shard that one rank of the ring holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    listed, row = _held(pack, index)
    trained, reads = row.unique(return_inverse=True)
    return Shard(
        tokens_t=pack.tokens_T[index],
        targets_t=pack.targets_T[index],
        positions_t=pack.positions_T[index],
        index_t=index,
        trained_u=trained,
        reads_n=reads if len(trained) < len(row) else None,
        sequence_n=pack.sequence_N[listed],
        listed_n=listed,
        sequences=pack.sequences,
        real_tokens=deal.real[ring.rank],
        sequence_tokens=sum(pack.lengths),
        most_work=max(work),
        mean_work=sum(work) / ring.size,
        attention=attention,
        ring=ring,
    )


def _held(pack: Pack, index_t: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the pack's trained tokens a rank predicts, and by which of its rows, in the rows' order."""
    row_T = torch.full((len(pack.tokens_T),), -1)
    row_T[index_t] = torch.arange(len(index_t))
    row_N = row_T[pack.place_N]
    listed_n = (row_N >= 0).nonzero().squeeze(-1)
    order_n = row_N[listed_n].argsort(stable=True)
    listed_n = listed_n[order_n]
    return listed_n, row_N[listed_n]
