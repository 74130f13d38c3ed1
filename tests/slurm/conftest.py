"""A Slurm for the tests. It comes up for the first test that needs it, and goes down after the last test or when the
tests are killed. Where Slurm cannot be installed, the tests are skipped and say why."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm.lab import Lab, guard
from tests.helpers.slurm.machine import Unable
from tests.helpers.slurm.shape import Shape

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, so that they run only on request."""
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
    """Two nodes with accounting. Every test starts with idle nodes and an empty queue."""
    yield session_lab
    for node in session_lab.shape.node_names:
        if not session_lab.is_running(node):
            session_lab.start_node(node)
    session_lab.cancel_all()


@pytest.fixture(scope="session")
def lab_without_accounting() -> Iterator[Lab]:
    with brought_up(Shape(nodes=1, accounting=False, name="bare")) as lab:
        yield lab
