"""Several sources in one order, and held-out rows: the same on every layout, every row before any again."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.errors import ConfigError
from rlexp.config.load import compose_config
from rlexp.training.dataset.sampler import Mixture, Sampler
from rlexp.training.dataset.store import Store
from rlexp.training.dataset.views import Joined, Places, drawn
from rlexp.training.dealer.of_run import without_room
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World
from tests.helpers.rows import cache, write_lines

__all__ = ["cache"]  # a fixture of every test here too


def test_without_shuffling_sources_take_turns_by_their_weights_and_decimal_ones_take_all_rows_that_fit() -> None:
    assert Mixture((4, 8), (1.0, 2.0)).order(0, 0, shuffle=False).tolist() == [4, 0, 5, 6, 1, 7, 8, 2, 9, 10, 3, 11]
    assert Mixture((2, 9), (1.0, 1.0)).order(0, 1, shuffle=False).tolist() == [0, 4, 1, 5]
    assert Mixture((700, 300), (0.7, 0.3)).counts == (700, 300)
    assert Mixture((7, 3), (0.1, 0.2)).counts == (1, 3)


@pytest.mark.parametrize("mixture", [None, Mixture((13, 8), (1.0, 2.0))])
def test_a_step_s_batch_depends_on_the_seed_alone(mixture: Any) -> None:
    sampler = Sampler(21, 4, seed=5, mixture=mixture)
    steps = range(1, 3 * sampler.steps_per_epoch + 1)
    batches = [sampler.batch(step).indices for step in steps]
    assert [Sampler(21, 4, seed=5, mixture=mixture).batch(step).indices for step in reversed(steps)] == batches[::-1]
    assert [Sampler(21, 4, seed=6, mixture=mixture).batch(step).indices for step in steps] != batches


@given(st.integers(2, 60), st.data())
def test_held_out_rows_and_the_others_are_all_rows_once(total: int, data: Any) -> None:
    size = data.draw(st.integers(1, total - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    out = drawn(total, size)
    assert len(set(out.tolist())) == size
    train, held = Places(total, out, held_out=False), Places(total, out, held_out=True)
    places = [train[index] for index in range(len(train))], [held[index] for index in range(len(held))]
    assert sorted([*places[0], *places[1]]) == list(range(total))
    assert places[0] == sorted(places[0])
    assert places[1] == out.tolist()
    for cut in cuts:
        assert train.before(cut) == sum(place < cut for place in places[0])
    assert out.tolist() == drawn(total, size).tolist()


def test_a_place_among_others_costs_no_array() -> None:
    train = Places(1 << 20, drawn(1 << 20, 1 << 16), held_out=False)
    first = train[0]
    tracemalloc.start()
    assert train[1] > first
    assert tracemalloc.get_traced_memory()[1] < train.out.nbytes
    tracemalloc.stop()


def test_only_rows_that_may_have_no_room_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path, [rows_of("x" * length, 1)[0] for length in range(40)])
    words = ("data.unpair=true", "data.eval_size=5", "train.max_tokens_per_micro_batch=40")
    cfg = compose_config(["loss=kto", "data=jsonl", f"data.path={path}", "launch.device=cpu", *words])
    train = read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE)).train
    tokens = [len(each.prompt) + len(each.answers[0]) for each in train]
    read: list[Any] = []
    monkeypatch.setattr(Store, "at", lambda *_, before=Store.at: read.append(_) or before(*_))
    assert f"has {max(tokens)} tokens" in str(without_room(cfg, train))
    assert 0 < len(read) == sum(each > 40 for each in tokens) < len(train)


def test_an_example_in_memory_that_has_no_room_is_named() -> None:
    cfg = compose_config(["launch.device=cpu", "train.max_tokens_per_micro_batch=8"])
    ids = np.arange(20, dtype=np.int32)
    pairs = [Example(place, ids[:3], (ids[3 : 3 + size], ids[18:]), origin=f"pair {size}")
             for place, size in enumerate((1, 9))]  # fmt: skip
    assert "pair 9: has 17 tokens" in str(without_room(cfg, pairs))


def rows_of(name: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{name} {number}", "chosen": "yes", "rejected": "no"} for number in range(count)]


def test_a_weight_that_takes_no_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, other = write_lines(tmp_path / "a", rows_of("a", 40)), write_lines(tmp_path, rows_of("b", 20))
    sources = [f"data.sources.a={{path: {one}, weight: 0.001}}", f"data.sources.b={{path: {other}, weight: 1}}"]
    cfg = compose_config(["data=hf", "launch.device=cpu", "logger.progress=false", *sources])
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.weight=0\.001: no sample of this source is in an epoch"):
        read_examples(cfg, byte_tokenizer(), World(0, 1, ALONE))


def test_sets_are_joined_and_numbered() -> None:
    sets = [[Example(0, np.zeros(1, np.int32), text=name) for name in names] for names in ("ab", "", "cde")]
    joined = Joined(sets)
    assert [(each.index, each.text) for each in joined] == [(0, "a"), (1, "b"), (2, "c"), (3, "d"), (4, "e")]
    assert [each.text for each in joined[1:4]] == ["b", "c", "d"]
    assert joined[-1].text == "e"
    assert joined.sizes() == (2, 0, 3)
    assert Joined(sets, Places(5, np.array([1, 4]), held_out=False)).sizes() == (1, 0, 2)
    with pytest.raises(IndexError):
        joined[5]
