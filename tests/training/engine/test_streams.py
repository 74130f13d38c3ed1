"""DeepSpeed reduces gradients on a stream of its own: what it reads and writes there must not be given away."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import on_ranks
from tests.helpers.reduced_apart import USUAL, Words, as_rank, hold
from tests.helpers.rehearsals import parted

OTHERS: list[Words] = [
    {"name": name, "precision": precision, "offload": offload}
    for name in ("zero1", "zero2", "zero3")
    for precision in ("bf16", "fp32")
    for offload in ("none", "optimizer")
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_no_gradient_is_given_away_while_it_is_reduced(rank: int, cases: list[Words]) -> None:
    """As the owner of some matrices and not of others. Without `_KeptGradient`, zero2 in bf16 gives 6 of 12 away."""
    (found,) = on_ranks(1, parted, as_rank, ("cpu", 32, cases, rank))
    for words, case in zip(cases, found, strict=True):
        hold(words, case)
