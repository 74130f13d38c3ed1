"""A planted defect is found by name, reaches every reference, is undone, and says so when it cannot be planted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.faults.plant import CannotPlant, Change, Given, Seeing, plant

HERE = "tests.verify.test_planting"
LIMIT = (3, 4)


def doubled(value: int, *, by: int = 2) -> int:
    """It has a second name below, as if another module had imported it."""
    return value * by


alias = doubled


def largest(values: list[int]) -> int:
    return max(values)


def rounded(value: float) -> float:
    return float(torch.round(torch.tensor(value)))


@torch.no_grad()
def decorated(value: torch.Tensor) -> torch.Tensor:
    return value * 2


class Base:
    limit = 5

    def method(self) -> int:
        return 1


@dataclass(frozen=True)
class Derived(Base):
    size: int = 7

    def method(self) -> int:
        return super().method() + self.size

    @property
    def half(self) -> int:
        return self.size // 2

    @cached_property
    def whole(self) -> int:
        return self.size

    @staticmethod
    def of(value: int) -> int:
        return value

    @classmethod
    def made(cls, size: int) -> Derived:
        return cls(size)

    def each(self) -> Iterator[int]:
        yield from range(self.size)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value**2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def slope() -> float:
    value = torch.tensor(3.0, requires_grad=True)
    Squared.apply(value).backward()
    assert value.grad is not None
    return float(value.grad)


def more(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) + 100


@pytest.mark.parametrize(
    ("target", "change", "value", "right", "wrong"),
    [
        ("doubled", more, lambda: doubled(3, by=3), 9, 109),
        ("doubled", more, lambda: alias(3), 6, 106),
        ("decorated", more, lambda: decorated(torch.tensor(3.0, requires_grad=True)).tolist(), 6, 106),
        ("Derived.method", more, lambda: Derived().method(), 8, 108),
        ("Derived.half", more, lambda: Derived().half, 3, 103),
        ("Derived.whole", more, lambda: Derived().whole, 7, 107),
        ("Derived.of", more, lambda: Derived.of(2), 2, 102),
        ("Derived.made", lambda original, cls, size: original(cls, size + 1), lambda: Derived.made(2).size, 2, 3),
        ("Derived.__init__", lambda original, self, size=1: original(self, size), lambda: Derived().size, 7, 1),
        ("Derived.each", lambda original, self: [*original(self), 7], lambda: sum(Derived(3).each()), 3, 10),
        ("Squared.backward", more, slope, 6, 106),
        ("largest", Seeing({"max": lambda _: min}), lambda: largest([1, 2]), 2, 1),
        ("rounded", Seeing({"torch.round": lambda _: torch.ceil}), lambda: rounded(1.2), 1, 2),
        ("largest", Seeing({"max": Given(lambda highest, values: lambda _: highest(values) + len(values))}),
         lambda: largest([1, 2]), 2, 4),
        ("LIMIT", lambda limit: (*limit, 5), lambda: len(LIMIT), 2, 3),
        ("Derived.limit", lambda limit: limit + 1, lambda: Derived().limit, 5, 6),
    ],
)  # fmt: skip
def test_a_change_is_at_work_until_it_is_undone(
    target: str, change: Change, value: Callable[[], Any], right: Any, wrong: Any
) -> None:
    marks: list[int] = []
    assert value() == right
    undo = plant(f"{HERE}:{target}", change, lambda: marks.append(1))
    try:
        assert value() == wrong
        assert marks
    finally:
        undo()
    assert value() == right


def test_a_constant_is_replaced_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = ModuleType("tests.importing")
    importing.LIMIT = LIMIT  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.importing", importing)
    undo = plant(f"{HERE}:LIMIT", lambda _: (1, 2), lambda: None)
    assert importing.LIMIT == (1, 2)
    undo()
    assert importing.LIMIT is LIMIT


def test_a_change_that_nothing_calls_is_not_marked() -> None:
    marks: list[int] = []
    for change in (more, Seeing({"max": lambda _: min})):
        plant(f"{HERE}:largest", change, lambda: marks.append(1))()
    assert not marks


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        ("tests.no_such_module:x", more, "no such thing"),
        (f"{HERE}:gone", more, "no such thing"),
        (f"{HERE}:Derived.gone", more, "no such thing"),
        (f"{HERE}:largest", Seeing({"min": lambda _: max}), "does not use min"),
        (f"{HERE}:rounded", Seeing({"torch.ceil": lambda _: max}), "does not use ceil"),
        (f"{HERE}:LIMIT", lambda limit: limit, "leaves it as it is"),
    ],
)
def test_what_cannot_be_planted_says_so(target: str, change: Change, said: str) -> None:
    with pytest.raises(CannotPlant, match=said):
        plant(target, change, lambda: None)


def test_an_error_names_the_place_of_the_function() -> None:
    """`verify` reads the module from a traceback."""
    undo = plant(f"{HERE}:doubled", lambda _original, _value: 1 / 0, lambda: None)
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            doubled(1)
    finally:
        undo()
    assert [entry.name for entry in raised.traceback][1] == "doubled"
