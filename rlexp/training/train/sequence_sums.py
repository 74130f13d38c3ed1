"""Sums over the trained tokens of each sequence, and the score where an answer ends, which is on one rank of the ring.

Shape letters: S sequences, n trained tokens of one rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlexp.training.model.reward_model import here
from rlexp.training.types import Pack, Shard


def sum_by_sequence(values_n: Tensor, shard: Shard) -> Tensor:
    """Add up this rank's values of each sequence, (S,), in float64: thousands of terms, and differences after."""
    sums = torch.zeros(shard.sequences, dtype=torch.float64, device=values_n.device)
    return sums.index_add(0, shard.sequence_n, values_n.double())


def with_ends(shard: Shard, pack: Pack) -> Shard:
    """Return the shard with the places of the sequences' ends that it holds."""
    here_S, place_S = here(shard, pack.end_S)
    ended_n = here_S.nonzero().squeeze(-1)
    return replace(shard, ends_n=place_S[ended_n], ended_n=ended_n)


def scores_by_sequence(scores_n: Tensor, shard: Shard) -> Tensor:
    """Return (S,) in float64, to be summed over the ring: the scores of sequences that end in the shard, else 0."""
    assert shard.ended_n is not None
    zeros_S = torch.zeros(shard.sequences, dtype=torch.float64, device=scores_n.device)
    return zeros_S.index_copy(0, shard.ended_n, scores_n.double())
