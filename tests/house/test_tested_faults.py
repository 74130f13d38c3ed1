"""Defects that `verify` does not see: the test that is to find each is there, and fails with it."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from tests.helpers.faults import ALL_FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.faults.tested import TESTED
from tests.helpers.paths import ROOT
from tests.helpers.planted import FAILED, tried


def test_every_defect_can_be_planted_and_has_its_test() -> None:
    names = [*ALL_FAULTS, *(fault.name for fault in TESTED)]
    assert len(set(names)) == len(names), "two defects have the same name"
    for fault in TESTED:
        fault.plant(lambda: None)()
        file, _, name = fault.test.partition("::")
        there = {each.name for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)}
        assert name in there, fault.name


# They take 6 to 15 seconds each: a pytest of its own, and where ranks run, those.
@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in TESTED])
def test_a_defect_is_found_by_its_test(fault: Fault) -> None:
    assert tried(fault) == "yes"


def test_a_test_that_breaks_has_found_nothing() -> None:
    """Only what it asserts counts, also where pytest shows only the expression, and an error of what was drawn."""
    for said, found in (("AssertionError: assert 1 == 2", True), ("assert 1 == 2", True), ("KeyError: 'a'", False),
                        ("rlexp.base.errors.DrawError: row 0: …", True)):  # fmt: skip
        assert bool(FAILED.search(f"1 failed\nFAILED tests/x.py::test_y - {said}\n")) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "test", "said"),
    [
        ("an export without rank-stabilised scaling",
         "test_adapter_exports.py::test_an_export_computes_what_was_trained[rank]", "no: 1 passed"),
        ("moments of the first group", "test_head.py::test_scores_are_sums_in_float32", "no: not reached: 2 passed"),
    ],
    ids=["passes with it", "does not reach it"],
)  # fmt: skip
def test_a_test_that_finds_nothing_is_told(name: str, test: str, said: str) -> None:
    (fault,) = (fault for fault in TESTED if fault.name == name)
    assert tried(dataclasses.replace(fault, test=f"tests/training/model/{test}")).startswith(said)
