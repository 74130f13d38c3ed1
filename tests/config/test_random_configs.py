"""Random command lines, 25 in `make test` and three hundred in `make check`: none ends in a traceback.
`make random-configs` tries 10,000."""

from __future__ import annotations

import pytest

from tests.helpers.random_configs import run

COUNT = 25


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 12))])
def test_a_random_command_line_composes_or_is_one_message(part: int) -> None:
    tally = run(part * COUNT, COUNT, seed=0)
    assert tally.defects == []
    assert tally.valid > 0
    assert tally.refused > COUNT // 2
