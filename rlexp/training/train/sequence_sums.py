"""Sums over the tokens of each sequence. Shape letters: S sequences, t tokens of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.training.types import Shard


def owners(shard: Shard) -> Tensor:
    """Return the sequence of each token, (t,), and S where nothing is trained on."""
    return shard.sequence_t.masked_fill(shard.sequence_t < 0, shard.sequences)


def sum_by_sequence(values_t: Tensor, shard: Shard) -> Tensor:
    """Add up this rank's values of each sequence, (S,), in float64: thousands of terms, and differences after."""
    sums = torch.zeros(shard.sequences + 1, dtype=torch.float64, device=values_t.device)
    return sums.index_add(0, owners(shard), values_t.double())[:-1]
