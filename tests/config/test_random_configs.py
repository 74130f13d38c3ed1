"""Random command lines, 25 in `make test` and three hundred in `make check`: none ends in a traceback.
`make random-configs` tries 10,000."""

from __future__ import annotations

import pytest

from tests.helpers.random_configs import run


@pytest.mark.parametrize(
    ("first", "count"), [(0, 25), *(pytest.param(first, 55, marks=pytest.mark.slow) for first in range(25, 300, 55))]
)
def test_a_random_command_line_composes_or_is_one_message(first: int, count: int) -> None:
    tally = run(first, count, seed=0)
    assert tally.defects == []
    assert tally.valid > 0
    assert tally.refused > count // 2
