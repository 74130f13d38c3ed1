"""Some hundred random command lines: none ends in a traceback. `python -m tests.random_configs 10000` tries more."""

from __future__ import annotations

import pytest

from tests.random_configs import run

COUNT = 100


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_a_random_command_line_composes_or_is_one_message(part: int) -> None:
    tally = run(part * COUNT, COUNT, seed=0)
    assert tally.defects == []
    assert tally.valid > 0
    assert tally.refused > COUNT // 2
