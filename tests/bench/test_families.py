"""The table of model families: what trains has its differences, and what does not has its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import families

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_families_are_held_to_their_model_alone_on_every_layout() -> None:
    """Windows in some layers, experts, and one that is refused. Float64; largest measured, of all families: 2e-14."""
    found = families.measure(["gemma3_text", "mixtral", "stablelm"], (1, 4))
    for name in ("gemma3_text", "mixtral"):
        assert found[name].refused is None
        assert 0 < found[name].logps < 1e-12
        assert 0 < found[name].gradients < 1e-12
    assert "StableLmAttention is given no batch: its layers hand on no keyword arguments" in found["stablelm"].reason
    table = families.table(found)
    assert table.startswith("2 of 3 families train.")
    assert "| `stablelm` | no keyword arguments for attention | refused: StableLmAttention is given no batch" in table


def test_the_page_has_every_family_and_enough_of_them_train() -> None:
    page = (ROOT / "docs" / "measured" / "models.md").read_text(encoding="utf-8")
    table = page.partition("<!-- families: begin -->")[2].partition("<!-- families: end -->")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (.*)$", table, re.MULTILINE))
    assert list(rows) == [family.name for family in families.FAMILIES]
    assert sum(not row.startswith("refused") for row in rows.values()) >= families.ENOUGH
