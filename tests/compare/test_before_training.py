"""A row of step 0, from before the first step, moves neither speed nor length; and the report has values by length."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlexp.compare import page
from rlexp.compare.comparison import lengths, speed, step_seconds
from rlexp.compare.divergence import taken
from rlexp.config.identity import changes
from rlexp.run_files.metrics_jsonl import columns_of
from rlexp.status.view import _curve

ROWS = [
    {"step": step, "train/loss": 1.0, "train/tokens": 100, "train/step_seconds": seconds}
    for step, seconds in ((1, 9.0), (2, 1.0), (3, 2.0))
]
BEFORE = {"step": 0, "train/global_step": 0, "eval/loss": 2.0, "eval/0-512/accuracy": 0.5, "eval/0-512/examples": 4}


def logged(rows: list[dict[str, Any]]) -> Any:
    steps, columns = columns_of(rows)

    def column(name: str) -> Any:
        return columns.get(name, np.full(len(steps), np.nan))

    return SimpleNamespace(steps=steps, columns=columns, column=column)


def test_speed_and_length_are_those_of_the_steps() -> None:
    without, with_it = logged(ROWS), logged([BEFORE, *ROWS])
    assert speed(with_it) == speed(without) == 200 / 3
    assert step_seconds(with_it) == step_seconds(without) == 1.5
    assert taken(with_it) == taken(without) == 3
    assert _curve([BEFORE, *ROWS]) == _curve(ROWS)
    assert _curve([BEFORE]).step == 0


def test_a_part_without_examples_has_no_accuracy() -> None:
    rows = [{**ROWS[0], "eval/0-512/examples": 3, "eval/0-512/loss": 0.5, "eval/0-512/accuracy": 2 / 3,
             "eval/0-512/accuracy_low": 0.2, "eval/0-512/accuracy_high": 0.9, "eval/2048+/examples": 0,
             "eval/512-2048/examples": 1, "eval/512-2048/loss": 0.7}]  # fmt: skip
    assert lengths(logged(rows)) == [
        page.LengthPart("0-512", 3, 0.5, 2 / 3, 0.2, 0.9),
        page.LengthPart("512-2048", 1, 0.7),
        page.LengthPart("2048+", 0),
    ]


def test_the_report_holds_them() -> None:
    run = page.RunCard("a", "a", "finished", lengths=[page.LengthPart("0-512", 3, 0.5, 1.0, 0.4, 1.0)])
    text = page.render(page.Payload("t", "now", "0", page.Banner("none", "h"), [run], [], []))
    found = re.search(r'id="report-head">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    (part,) = json.loads(found[1])["runs"][0]["lengths"]
    assert (part["name"], part["examples"], part["accuracy"]) == ("0-512", 3, 1.0)
    assert "fillLengths();" in text


def test_a_run_from_before_a_key_was_there_goes_on() -> None:
    assert list(changes({"seed": 1}, {"seed": 1, "data.unpair": False})) == []
    assert list(changes({"seed": 1}, {"seed": 1, "data.unpair": True})) == [("data.unpair", "False", "True")]
