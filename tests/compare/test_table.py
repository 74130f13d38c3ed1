"""The comparison's table on a terminal: it fits, and says where ranks shared the cores of a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlexp.compare.comparison import make, payload_of
from rlexp.compare.families import sort_out
from rlexp.compare.runs import RunReader
from rlexp.compare.table import blocks, table
from tests.helpers.report_pages import ring_sizes

ROWS = [["run", "steps", "last loss", "tokens/s"], ["ring1", "20", "0.693147", "12,345"], ["ring4", "20", "0.5", "9"]]


def test_columns_that_do_not_fit_stand_below_with_the_runs_again() -> None:
    (whole,) = blocks(ROWS, None)
    assert whole == [
        "run    steps  last loss  tokens/s",
        "─────  ─────  ─────────  ────────",
        "ring1  20     0.693147     12,345",
        "ring4  20     0.5               9",
    ]
    first, second = blocks(ROWS, 24)
    assert [line.split() for line in first] == [["run", "steps", "last", "loss"], ["─────", "─────", "─────────"],
                                                ["ring1", "20", "0.693147"], ["ring4", "20", "0.5"]]  # fmt: skip
    assert second == ["run    tokens/s", "─────  ────────", "ring1    12,345", "ring4         9"]
    assert len(list(blocks(ROWS, 3))) == 3  # a column that is too wide has a table of its own


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    lines = table(ring_sizes(), width).splitlines()
    assert max(map(len, lines)) <= width


def run_of(folder: Path, ranks: int, cores: int | None, device: str) -> None:
    folder.mkdir(parents=True)
    sizes = {"world_size": ranks, "ring_size": ranks, "dp_size": 1, "batch_size": 8}
    facts = {"status": "finished", "sizes": sizes, "cores": cores, "identity": {"seed": 0}}
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "config.yaml").write_text(f"launch:\n  device: {device}\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5, "eval/loss": 0.25}\n', encoding="utf-8")


def test_it_says_that_ranks_shared_cores_and_what_was_held_out(tmp_path: Path) -> None:
    for name, ranks, cores, device in (("two", 2, 2, "cpu"), ("eight", 8, 2, "cpu"), ("gpu", 8, 2, "cuda"),
                                       ("old", 8, None, "cpu")):  # fmt: skip
        run_of(tmp_path / name, ranks, cores, device)
    group = RunReader().group(tmp_path)
    assert group is not None
    report = make(group, sort_out(group, baseline=None, force=True))
    said = "eight: more ranks than cores (2). They took turns, so efficiency says nothing of GPUs."
    assert [note for note in report.notes if "cores" in note] == [said]
    payload = payload_of(report)
    assert {run.held_out for run in payload.runs} == {"loss 0.2500"}
    assert "held-out rows" in table(payload).splitlines()[0]
    (loss,) = (each for each in payload.metrics if each.name == "train/loss")
    assert [*loss.values] == [[0.5]] * 4
