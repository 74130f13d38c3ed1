"""The settings at fault are found by halving, whether one makes the difference or two together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlexp.verify.swap import SettingsSearch

NAMES = ("ring", "replicas", "micro-batches", "packing", "engine", "kernel", "layout", "sharing")
NEEDS = {"layout": {"ring"}, "sharing": {"packing"}}


def closed(names: Sequence[str]) -> set[str]:
    return set(names).union(*(NEEDS.get(name, set()) for name in names))


def search(fault: set[str]) -> tuple[list[str], int]:
    made = SettingsSearch(lambda names: fault <= set(names), closed)
    made.known[frozenset(closed(NAMES))] = True  # the user's own run
    return made.at_fault(NAMES), len(made.known) - 1


@pytest.mark.parametrize("name", NAMES)
def test_one_setting_takes_twice_as_many_starts_as_it_can_be_halved(name: str) -> None:
    names, starts = search({name})
    assert names == [name]
    assert starts <= 2 * 3  # eight settings


@pytest.mark.parametrize("pair", [(a, b) for n, a in enumerate(NAMES) for b in NAMES[n + 1 :]])
def test_two_settings_are_found_together(pair: tuple[str, str]) -> None:
    names, starts = search(set(pair))
    implied = {name for name in pair if any(name in NEEDS.get(other, ()) for other in pair)}
    assert set(names) == set(pair) - implied
    assert starts <= len(NAMES) + 1
