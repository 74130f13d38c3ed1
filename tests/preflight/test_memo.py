"""Remembered results of operators on tensors without memory: those that torch would make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlexp.config.schema import Config
from rlexp.preflight.rehearsal import memo
from rlexp.preflight.rehearsal.log import Counts, Log
from rlexp.preflight.rehearsal.mode import Rehearsing
from rlexp.preflight.rehearsal.rehearse import rehearse
from tests.helpers.rehearsals import alone, elsewhere, plan

aten = torch.ops.aten


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memo, "KNOWN", {})
    with FakeTensorMode() as mode:
        remembering = memo.Memo(mode, "cpu")

        def call(func: Any, *args: Any) -> Any:
            place = remembering.place(func, args, {})
            if place is not None and (again := remembering.again(place, args)) is not None:
                return again[0]
            made = func(*args)
            if place is not None:
                remembering.learn(place, args, made, memo.Cost())
            return made

        yield call


def test_a_view_stands_where_its_argument_stands(call: Any) -> None:
    many = torch.empty(4096)
    for start in (1000, 0, 20):
        assert call(aten.slice.Tensor, many[start : start + 10], 0, 4, 8).storage_offset() == start + 4
        assert call(aten.view.dtype, many[start : start + 10], torch.uint8).storage_offset() == 4 * start
        assert call(aten.as_strided.default, many[start : start + 10], [2], [1], start).storage_offset() == start


def test_a_tensor_of_its_own_has_the_bytes_up_to_its_last_element() -> None:
    assert [memo._extent(each) for each in (torch.empty(3, 4), torch.empty(3, 4)[:, :2], torch.empty(0))] == [48, 40, 0]


def test_a_tensor_that_is_given_twice_is_read_once_each_time() -> None:
    log = Log("cpu")
    with Rehearsing(log):
        one, other = torch.empty(100), torch.empty(100)
        for _ in range(2):
            moved = []
            for given in ((one, other), (one, one), (other, one), (other, other)):
                before = log.counts.bytes
                torch.cat(given)
                moved.append(log.counts.bytes - before)
            assert moved == [400 + 400 + 800, 400 + 800, 400 + 400 + 800, 400 + 800]


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def test_what_is_made_of_truths_has_the_default_dtype_of_now(default_dtype: Callable[[torch.dtype], None]) -> None:
    with Rehearsing(Log("cpu")):
        whole = torch.empty(100) > 0  # an integer of the host would be real
        for dtype in (torch.float32, torch.float64, torch.float32):
            default_dtype(dtype)
            assert torch.true_divide(whole, 2).dtype is dtype


def events(cfg: Config, remembering: bool) -> tuple[list[int], list[int], list[Counts], int]:
    """Rehearse a run; return its events, its counts, and how many operators' results were made of what was known."""
    made = 0
    again = memo.Memo.again

    def noted(self: memo.Memo, place: Any, args: Any) -> Any:
        nonlocal made
        result = again(self, place, args) if remembering else None
        made += result is not None
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memo.Memo, "again", noted)
        log = rehearse(plan(cfg, 0, gpu=True))
    return log.numbers, log.sizes, [each.counts for each in log.sections], made


@pytest.mark.parametrize("words", ["zero1 memory.checkpointing=true loss=grpo reward.text=a", "fsdp2"])
def test_what_is_remembered_moves_no_event_and_no_count(words: str) -> None:
    cfg = elsewhere("parallel=ring2", "launch.nproc=2", *f"engine={words}".split())
    numbers, sizes, counts, made = alone(events, cfg, True)
    assert (numbers, sizes, counts, 0) == alone(events, cfg, False)
    assert made > 1000, "hardly anything was remembered"
