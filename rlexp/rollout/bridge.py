"""Between the ranks that train and those that only sample: two worlds, each with its own process group, and a bridge.

The groups here are gloo's, on the host, whatever the ranks compute on. A rank's collectives elsewhere (of its engine,
of its ring) never meet the other world.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 1 << 22  # elements of a weight handed over at once
PATIENCE = timedelta(days=7)  # a rollout may take long; who dies closes its connections, and is noticed at once


@dataclass(frozen=True)
class Bridge:
    """`rank` counts all ranks, those that train first. `weights` joins rank 0 with those that sample."""

    rank: int
    training: int
    sampling: int
    everybody: Any
    weights: Any | None

    @property
    def samples(self) -> bool:
        return self.rank >= self.training

    @property
    def sampler(self) -> int:
        """Which of the ranks that sample this is."""
        return self.rank - self.training

    def tell(self, message: Any = None) -> Any:
        """From rank 0 to those that sample."""
        return _broadcast(self.weights, message, 0, mine=self.rank == 0)

    def hand_over(self, weight: Tensor) -> None:
        """A weight to those that sample, a piece at a time. On rank 0."""
        for piece in weight.detach().reshape(-1).split(PIECE):
            _run(self.weights, piece.to("cpu").contiguous(), 0)

    def take_over(self, into: Tensor) -> None:
        """The other end of it."""
        assert into.is_contiguous(), "what is written into a copy would be lost"
        for part in into.detach().view(-1).split(PIECE):
            piece = part.to("cpu")
            _run(self.weights, piece, 0)
            part.copy_(piece)

    def show(self, sampler: int, message: Any = None) -> Any:
        """From one that samples to everybody."""
        root = self.training + sampler
        return _broadcast(self.everybody, message, root, mine=self.rank == root)

    def shown(self, sampler: int) -> Iterator[Any]:
        """Everything that it shows, until None."""
        while (message := self.show(sampler)) is not None:
            yield message

    def agreed(self, value: Any) -> Any:
        """Rank 0's, on every rank of both worlds."""
        return _broadcast(self.everybody, value, 0, mine=self.rank == 0)


def build(store: Any, rank: int, training: int, sampling: int) -> Bridge:
    """A collective call of all ranks."""
    everybody = dist.ProcessGroupGloo(dist.PrefixStore("everybody", store), rank, training + sampling, PATIENCE)
    weights = None
    if rank == 0 or rank >= training:
        place = 0 if rank == 0 else 1 + rank - training
        weights = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), place, 1 + sampling, PATIENCE)
    return Bridge(rank, training, sampling, everybody, weights)


def _run(group: Any, tensor: Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()


def _broadcast(group: Any, message: Any, root: int, *, mine: bool) -> Any:
    data = np.frombuffer(pickle.dumps(message), dtype=np.uint8) if mine else np.zeros(0, dtype=np.uint8)
    length = torch.tensor([len(data)])
    _run(group, length, root)
    buffer = torch.from_numpy(data.copy()) if mine else torch.empty(int(length), dtype=torch.uint8)
    _run(group, buffer, root)
    return message if mine else pickle.loads(buffer.numpy().tobytes())
