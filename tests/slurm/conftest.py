"""A Slurm of the tests' own: brought up for the first test that asks for it, taken down after the last, or when the
tests are killed. Where there can be none, the tests are skipped, and say why."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, guard
from tests.slurm.machine import Unable
from tests.slurm.shape import Shape

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing in this folder runs unless it is asked for."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)


@contextlib.contextmanager
def brought_up(shape: Shape) -> Iterator[Lab]:
    lab = Lab(Path(tempfile.mkdtemp(prefix="rlexp-slurm-")), shape)
    try:
        lab.up()
    except Unable as error:
        pytest.skip(f"no Slurm here: {error}")
    try:
        guard(lab)
        yield lab
    finally:
        lab.down()


@pytest.fixture(scope="session")
def session_lab() -> Iterator[Lab]:
    with brought_up(Shape()) as lab:
        yield lab


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """Two nodes with accounting. A test finds all nodes idle and no job, whatever the one before it left."""
    yield session_lab
    for node in session_lab.shape.node_names:
        if not session_lab.is_running(node):
            session_lab.start_node(node)
    session_lab.cancel_all()


@pytest.fixture(scope="session")
def lab_without_accounting() -> Iterator[Lab]:
    with brought_up(Shape(nodes=1, accounting=False, name="bare")) as lab:
        yield lab
