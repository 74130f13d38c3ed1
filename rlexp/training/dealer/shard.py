"""Take from a pack the shard that one rank of the ring holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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
    placement = layout.place(pack.segments, ring.size)
    attention = RingBatch(layout, pack.segments, ring, kernel, max_length)
    works = {window: layout.work(pack.segments, ring.size, window) for window in dict.fromkeys(windows)}
    for window in works:
        attention.plan(window)
    work = [sum(works[window][rank] for window in windows) / len(windows) for rank in range(ring.size)]
    index = placement.places[ring.rank]
    listed_n, row_n = _held(pack, index)
    trained_u, reads_n = np.unique(row_n, return_inverse=True)
    listed = torch.from_numpy(listed_n)
    return Shard(
        tokens_t=pack.tokens_T[index],
        targets_t=pack.targets_T[index],
        positions_t=pack.positions_T[index],
        index_t=index,
        trained_u=torch.from_numpy(trained_u),
        reads_n=torch.from_numpy(reads_n) if len(trained_u) < len(row_n) else None,
        sequence_n=pack.sequence_N[listed],
        listed_n=listed,
        sequences=pack.sequences,
        real_tokens=placement.real[ring.rank],
        sequence_tokens=sum(pack.lengths),
        most_work=max(work),
        mean_work=sum(work) / ring.size,
        attention=attention,
        ring=ring,
    )


def _held(pack: Pack, index_t: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the pack's trained tokens a rank predicts, and by which of its rows, in the rows' order."""
    row_T = np.full(len(pack.tokens_T), -1)
    row_T[index_t.numpy()] = np.arange(len(index_t))
    row_N = row_T[pack.place_N.numpy()]
    listed_n = np.flatnonzero(row_N >= 0)
    listed_n = listed_n[np.argsort(row_N[listed_n], kind="stable")]
    return listed_n, row_N[listed_n]
