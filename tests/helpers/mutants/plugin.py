"""A plugin of pytest that writes which watched places each test reaches, and how long the test takes."""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mutants.planting import VARIABLE, Plan
from tests.helpers.mutants.sites import WATCH

_outcomes: list[bool] = []
_shared: dict[str, set[int]] = {"reached": set(), "active": set()}


def pytest_collection_finish() -> None:
    _share(noted(_log(), 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    log = _log()
    before = _begun(log)
    _outcomes.clear()
    began = time.monotonic()
    try:
        return (yield)
    finally:
        row = {"name": item.nodeid, "seconds": time.monotonic() - began, "found": None if all(_outcomes) else "failed"}
        _write(log, row | noted(log, before))
        _share(noted(log, before, imported=True))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Note what a fixture of several tests reaches: any of them may tell what is wrong with it."""
    log = _log()
    before = _begun(log)
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _share(noted(log, before))


def _share(noted: dict[str, list[int]]) -> None:
    for what, numbers in noted.items():
        _shared[what] |= set(numbers)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _outcomes.append(report.outcome == "passed")


def pytest_sessionfinish() -> None:
    _write(_log(), {what: sorted(numbers) for what, numbers in _shared.items()})


def noted(log: Path, after: int, *, imported: bool = False) -> dict[str, list[int]]:
    """Return the places that the log names after a position; `imported`: those that an import has reached."""
    if not log.exists():
        return {"reached": [], "active": []}
    with log.open() as file:
        file.seek(after)
        lines = [line.split() for line in file]
    return {what: sorted({int(number) for number, kind, *how in lines if kind == what and (how or not imported)})
            for what in ("reached", "active")}  # fmt: skip


def _log() -> Path:
    return Path(Plan.read(Path(os.environ[VARIABLE])).log or "")


def _begun(log: Path) -> int:
    """Return the log's size; from now on this process notes again what it has noted before."""
    getattr(builtins, WATCH).forget()
    return log.stat().st_size if log.exists() else 0


def _write(log: Path, row: dict[str, Any]) -> None:
    with log.with_suffix(".tests").open("a") as tests:
        tests.write(json.dumps(row) + "\n")
