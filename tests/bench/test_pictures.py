"""What the pictures of docs/ draw is computed by the product's own code, and `make test` computes it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench import (
    batch_picture,
    bug_report,
    data_picture,
    holding,
    learning,
    longest_picture,
    pictures,
    pipeline,
    report_picture,
    vllm_curves,
)
from tests.helpers.models import made, smollm2


def test_every_pair_of_a_query_and_a_key_is_computed_once() -> None:
    panels = holding.panels_of_all()
    assert holding.wrong(panels) == []
    panels["zigzag"][0].times[3, 1] += 1
    assert holding.wrong(panels) == ["zigzag, heads 0 – 7"]


def test_every_pair_of_a_train_batch_is_computed_once() -> None:
    layouts = [batch_picture.layout(ring) for ring in batch_picture.RINGS]
    assert batch_picture.wrong(layouts) == []
    assert batch_picture.wrong([replace(layouts[0], work={(0, 0): (1, 1)})]) == [8]


def test_the_longest_pair_is_read_from_its_table() -> None:
    lines = longest_picture.chosen(longest_picture.read(longest_picture.TABLE))
    assert {engine for line in lines for engine in line.engine.split(", ")} == {"torch", "zero0", "zero1", "zero2",
                                                                                 "zero3", "fsdp2"}  # fmt: skip
    assert {longest_picture.ADAPTER in line.memory for line in lines} == {True, False}
    assert all(list(line.tokens) == sorted(line.tokens) for line in lines)


# ---- each picture says what it shows, and that is what the product computes now ----

# Pictures of what was measured: the page has the same numbers in a table whose head begins so.
OF_TABLES = {"pipeline.png": pipeline.FIRST, "learning.png": learning.FIRST, "rollouts_gpu.png": vllm_curves.FIRST}
OF_CODE: dict[str, Callable[[], Any]] = {
    "batch.png": lambda: batch_picture.shows([batch_picture.layout(ring) for ring in batch_picture.RINGS]),
    "layouts.png": lambda: holding.shows(holding.panels_of_all()),
    "longest.png": lambda: longest_picture.shows(longest_picture.chosen(longest_picture.read(longest_picture.TABLE))),
}
REST = {"data.png", "why.png", "report.png"}  # slow ones, below
STEPS = 2  # of a curve that are trained again


def redraw(name: str, module: str) -> str:
    return f"docs/{name} is out of date. Draw it again: python -m {module} --write docs/{name}"


def test_every_picture_is_compared() -> None:
    assert {path.name for path in pictures.DOCS.glob("*.png")} == {*OF_TABLES, *OF_CODE, *REST}


@pytest.mark.parametrize("name", OF_CODE)
def test_a_picture_shows_what_the_code_computes(name: str) -> None:
    module = {"batch.png": "bench.batch_picture", "layouts.png": "bench.holding"}.get(name, "bench.longest_picture")
    assert pictures.same(pictures.shown(pictures.DOCS / name), OF_CODE[name]()), redraw(name, module)


@pytest.mark.parametrize("name", OF_TABLES)
def test_a_picture_shows_the_numbers_of_its_table(name: str) -> None:
    rows = pictures.numbers_on_page(OF_TABLES[name])
    assert rows
    assert pictures.shown(pictures.DOCS / name) == rows, f"docs/{name} and its table are from different measurements"


@pytest.mark.slow
def test_the_terminal_shows_what_the_command_prints() -> None:
    made(smollm2())
    text = data_picture.drawn().export_text(clear=False).splitlines()
    assert pictures.shown(pictures.DOCS / "data.png") == text, redraw("data.png", "bench.data_picture")


@pytest.mark.slow
def test_the_bug_report_shows_the_curves_of_the_code() -> None:
    logged, elsewhere = bug_report.curves(STEPS)
    drawn = pictures.shown(pictures.DOCS / "why.png")
    for name, curves in (("logged", logged), ("elsewhere", elsewhere)):
        first = [curve[:STEPS] for curve in drawn[name]]
        assert pictures.same(first, [each.tolist() for each in curves]), redraw("why.png", "bench.bug_report")


@pytest.mark.slow
def test_the_report_shows_the_curve_of_the_code(rlexp: Callable[..., Any], tmp_path: Path) -> None:
    words = [word for word in report_picture.SWEEP[2:] if not word.startswith("train.eval_every")]
    answer = rlexp("parallel=ring1", *words, f"train.stop_after={STEPS}", "hydra.run.dir=run", "launch.nproc=8")
    assert answer.returncode == 0, answer.stderr
    drawn = pictures.shown(pictures.DOCS / "report.png")[report_picture.LOSS][:STEPS]
    assert pictures.same(drawn, report_picture.losses(tmp_path / "run")), redraw("report.png", "bench.report_picture")


def test_what_a_picture_shows_is_read_back_and_compared(tmp_path: Path) -> None:
    figure = Figure(figsize=(1, 1))
    data = {"a": [1.0, 2, "é"], "b": {"c": None}}
    pictures.save(figure, tmp_path / "a.png", data)
    assert pictures.shown(tmp_path / "a.png") == data
    figure.savefig(tmp_path / "b.png")
    assert pictures.shown(tmp_path / "b.png") is None
    assert pictures.same(data, {"a": [1.00001, 2, "é"], "b": {"c": None}})
    for other in ({"a": [1.01, 2, "é"], "b": {"c": None}}, {"a": [1.0, 2], "b": {"c": None}}, {"a": data["a"]}, None):
        assert not pictures.same(data, other)
