"""Bridge between two worlds of ranks: those that train and those that only sample, each with its own process group.

The bridge's groups are gloo groups on the host, whatever device the ranks compute on. All other collectives of a rank
(those of its engine and its ring) stay within its own world. torch does not know these groups by name, so objects cross
the bridge as bytes, without torch's own functions for objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch import watch

PIECE = 1 << 22  # elements of a weight handed over at once


@dataclass(frozen=True)
class Bridge:
    """One rank's end. `rank` counts all ranks, training ranks first. `weights` joins rank 0 and the sampling ranks."""

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
        """This rank's number among the sampling ranks."""
        return self.rank - self.training

    def tell(self, message: Any = None) -> Any:
        """Send rank 0's message to the sampling ranks, and return it."""
        return _broadcast(self.weights, message, 0, sends=self.rank == 0)

    def hand_over(self, weight: Tensor) -> None:
        """On rank 0: send a weight to the sampling ranks, a piece at a time."""
        for piece in weight.detach().reshape(-1).split(PIECE):
            _run(self.weights, piece.to("cpu").contiguous(), 0)

    def take_over(self, into: Tensor) -> None:
        """On a sampling rank: receive a weight that rank 0 hands over."""
        assert into.is_contiguous(), "values written into a copy would be lost"
        for part in into.detach().view(-1).split(PIECE):
            piece = part.to("cpu")
            _run(self.weights, piece, 0)
            part.copy_(piece)

    def show(self, sampler: int, message: Any = None) -> Any:
        """Send a sampling rank's message to every rank of both worlds, and return it."""
        root = self.training + sampler
        return _broadcast(self.everybody, message, root, sends=self.rank == root)

    def shown(self, sampler: int) -> Iterator[Any]:
        """Yield every message that a sampling rank shows, until it shows None."""
        while (message := self.show(sampler)) is not None:
            yield message

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value on every rank of both worlds."""
        return _broadcast(self.everybody, value, 0, sends=self.rank == 0)


def build(store: Any, rank: int, training: int, sampling: int) -> Bridge:
    """Build this rank's end of the bridge. A collective call of all ranks of both worlds."""
    everybody = dist.ProcessGroupGloo(dist.PrefixStore("everybody", store), rank, training + sampling, watch.FOR_EVER)
    weights = None
    if rank == 0 or rank >= training:
        place = 0 if rank == 0 else 1 + rank - training
        weights = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), place, 1 + sampling, watch.FOR_EVER)
    return Bridge(rank, training, sampling, everybody, weights)


def _run(group: Any, tensor: Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()  # a rank that dies closes its connections and is noticed at once
    watch.note()


def _broadcast(group: Any, message: Any, root: int, *, sends: bool) -> Any:
    data = np.frombuffer(pickle.dumps(message), dtype=np.uint8) if sends else np.zeros(0, dtype=np.uint8)
    length = torch.tensor([len(data)])
    _run(group, length, root)
    buffer = torch.from_numpy(data.copy()) if sends else torch.empty(int(length), dtype=torch.uint8)
    _run(group, buffer, root)
    return message if sends else pickle.loads(buffer.numpy().tobytes())
