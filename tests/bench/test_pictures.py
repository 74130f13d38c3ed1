"""What the pictures of docs/ draw is computed by the product's own code, and `make test` computes it too."""

from __future__ import annotations

from dataclasses import replace

from bench import batch_picture, holding, longest_picture


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
    assert {line.engine for line in lines} >= {"zero1", "zero3", "fsdp2"}
    assert all(list(line.tokens) == sorted(line.tokens) for line in lines)
