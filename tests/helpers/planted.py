"""Run one test with a defect planted, in the pytest process and in all that it starts by tests/helpers/warm.py.

The environment names the defect, so what starts Python as a user does has it not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.paths import ROOT

if TYPE_CHECKING:
    from tests.helpers.faults.base import Fault

PLANTED = "RLEXP_TEST_PLANTED"  # names a defect of tests/helpers/faults/tested.py
REACHED = "RLEXP_TEST_REACHED"  # the file that appears when the defect is at work
LONGEST = 300.0  # seconds for one test
FAILED = re.compile(r"^FAILED .+? - (AssertionError|assert |rlexp\.base\.errors\.DrawError)", re.MULTILINE)


def plant_if_asked() -> None:
    """Plant the defect that the environment names into this process, and so into all that it forks."""
    if name := os.environ.get(PLANTED):
        from tests.helpers.faults.tested import TESTED

        (fault,) = (fault for fault in TESTED if fault.name == name)
        fault.plant(Path(os.environ[REACHED]).touch)


def tried(fault: Fault) -> str:
    """Return "yes" if the defect's test fails with it, by what it asserts or by refusing what was drawn. Else say what
    came of it."""
    with tempfile.TemporaryDirectory(prefix="rlexp-planted-") as folder:
        reached = Path(folder) / "reached"
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", fault.test],
                cwd=ROOT, env=env | {PLANTED: fault.name, REACHED: str(reached), "COLUMNS": "1000"},
                capture_output=True, text=True, timeout=LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no: its test has not ended after {LONGEST:.0f} s"
        if not reached.exists():
            return f"no: not reached: {last_line(done.stdout + done.stderr)}"
    return "yes" if FAILED.search(done.stdout) else f"no: {last_line(done.stdout)}"


def last_line(said: str) -> str:
    return (said.splitlines() or ["nothing was printed"])[-1]
