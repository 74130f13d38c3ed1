"""Remembered results of operators on tensors without memory: those that torch would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlexp.rehearse import memo

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
