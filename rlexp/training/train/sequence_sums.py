"""Sums over the trained tokens of each sequence. Shape letters: S sequences, n trained tokens of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.training.types import Shard


def sum_by_sequence(values_n: Tensor, shard: Shard) -> Tensor:
    """Add up this rank's values of each sequence, (S,), in float64: thousands of terms, and differences after."""
    sums = torch.zeros(shard.sequences, dtype=torch.float64, device=values_n.device)
    return sums.index_add(0, shard.sequence_n, values_n.double())
