"""deal.json: what is written is read back, and a file of another form is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlexp.run_files import deal_json
from rlexp.run_files.deal_json import RankDeal, SequencePart, StepDeal

DEAL = StepDeal(
    2,
    [
        RankDeal(1.2e9, 3.4e7, 0.81, [SequencePart(4, 812, 3.1e8), SequencePart(1, 90, 1e6)]),
        RankDeal(0.0, 0.0, None, []),
    ],
)


def test_a_deal_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / deal_json.DEAL
    assert deal_json.read(path) is None
    deal_json.write(path, DEAL)
    assert deal_json.read(path) == DEAL
    assert json.loads(path.read_text(encoding="utf-8"))["ranks"][0] == {
        "work": 1.2e9, "sending": 3.4e7, "seconds": 0.81, "parts": [[4, 812, 3.1e8], [1, 90, 1e6]],
    }  # fmt: skip


ANYTHING: tuple[Any, ...] = ("x", True, -1, float("nan"), float("inf"), 10**400, [1])
NO_RANKS: tuple[Any, ...] = (3, [], {"work": 5})
RANK: dict[str, Any] = {"work": 5, "sending": 0, "seconds": None, "parts": [[1, 2, 3]]}


@pytest.mark.parametrize(
    "content",
    [
        *([], {}, {"step": 1}, {"step": 1, "ranks": []}, {"step": 1, "ranks": {}}, {"step": 1.5, "ranks": [RANK]}),
        {"step": 1, "ranks": [RANK] * (deal_json.MOST_RANKS + 1)},
        *({"step": 1, "ranks": [rank]} for rank in NO_RANKS),
        *({"step": 1, "ranks": [RANK | {key: value}]} for key in ("work", "sending", "seconds")
          for value in ANYTHING),
        *({"step": 1, "ranks": [RANK | {"work": None}]}, {"step": 1, "ranks": [RANK | {"parts": None}]}),
        *({"step": 1, "ranks": [RANK | {"parts": [part]}]}
          for part in (3, [1, 2], [1, 2, 3, 4], [0, 2, 3], [1, -2, 3], [1, 2, "x"], [1.5, 2, 3], [1, 2, None])),
    ],
)  # fmt: skip
def test_a_deal_of_another_form_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / deal_json.DEAL).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not|has no"):
        deal_json.read(tmp_path / deal_json.DEAL)
