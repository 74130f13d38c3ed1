"""Tasks that need calls in processes of their own, and tasks of tasks."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlexp.preflight.children import at_once


def double(number: int) -> int:
    return 2 * number


def fail(number: int) -> int:
    raise ValueError(f"no {number}")


def slow(number: int) -> int:
    time.sleep(0.3)
    return -number


def doubled(*numbers: int) -> Any:
    return sum((yield [(double, (number,)) for number in numbers]))


def nested(depth: int) -> Any:
    if depth == 0:
        return (yield [])
    below, own = yield [nested(depth - 1), (double, (depth,))]
    return [*below, own]


def test_tasks_of_tasks() -> None:
    assert at_once([doubled(1, 2, 3), nested(3), doubled()], 2) == [12, [2, 4, 6], 0]
    assert at_once([], 2) == []
    assert gc.get_freeze_count(), "what pytest froze is looked through again"


def test_calls_run_elsewhere() -> None:
    def ask() -> Any:
        return (yield [(os.getpid, ()), (os.getpid, ())])

    ((one, other),) = at_once([ask()], 2)
    assert len({one, other, os.getpid()}) == 3


def test_the_first_of_what_a_task_needs_comes_first() -> None:
    """A long chain of calls does not wait behind what may come later."""

    def chain() -> Any:
        times = []
        for _ in range(3):
            times += yield [(time.monotonic_ns, ())]
        return times

    def both() -> Any:
        return (yield [chain(), chain()])

    ((first, other),) = at_once([both()], 1)
    assert first[-1] < other[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_raised_where_it_was_asked_for(processes: int) -> None:
    """The task goes on at once; answers to what it no longer waits for are not taken for others."""

    def below() -> Any:
        yield [(fail, (5,)), (slow, (1,))]

    def careful() -> Any:
        try:
            yield [below(), (slow, (2,))]
        except ValueError as error:
            again = yield [(slow, (3,)), (double, (4,))]
            return str(error), again

    assert at_once([careful(), doubled(7)], processes) == [("no 5", [-3, 8]), 14]
    with pytest.raises(ValueError, match="no 6"):
        at_once([doubled(1), iter_of((fail, (6,)))], processes)


def lasting(place: Path) -> None:
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)
    time.sleep(60)


def fail_beside(place: Path) -> None:
    end = time.monotonic() + 30
    while not place.exists() and time.monotonic() < end:
        time.sleep(0.01)
    raise ValueError("no 7")


def test_no_process_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no 7"):
        at_once([iter_of((each, (tmp_path / "process",))) for each in (lasting, fail_beside)], 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


class TwoWordsError(Exception):
    """An error that pickle writes and cannot read again."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def fail_in_words(one: str, other: str) -> int:
    raise TwoWordsError(one, other)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("also", "said"),
    [((slow, (1,)), "no 1"), ((fail, (2,)), "no 2"), ((fail_in_words, ("a", "b")), "TwoWordsError: ab")],
)
def test_a_task_that_ends_with_an_error_has_its_own_result(processes: int, also: Any, said: str) -> None:
    """What it asked for at the same time is for nobody, whether it comes or fails. Of two that fail side by side,
    either may be the first."""

    def careful(*calls: Any) -> Any:
        try:
            return (yield list(calls))
        except Exception as error:
            return f"refused: {error}"

    refused, other = at_once([careful((fail, (1,)), also), doubled(7)], processes)
    assert refused in {"refused: no 1", f"refused: {said}" if processes > 1 else ""}
    assert other == 14
    (told,) = at_once([careful((fail_in_words, ("a", "b")))], processes)
    assert told == "refused: TwoWordsError: ab"


def iter_of(*calls: Any) -> Any:
    return (yield list(calls))
