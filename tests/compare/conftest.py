"""Fixtures of the comparison's tests: two runs of one curve, and a picture that is put together and not painted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.curves import a_run


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Runs with rings of one and four ranks, as far apart as float32 rounds."""
    a_run(tmp_path / "runs" / "one")
    a_run(tmp_path / "runs" / "four", "parallel=ring4", noise=2e-7)
    return tmp_path / "runs"
