"""Folders that tests read from, and the environment of a `make` that a test starts."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "files"
# What a `make` that runs these tests tells its own children, and a chosen interpreter: neither is in a fresh clone.
INHERITED = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "VENV")


def outside_make() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in INHERITED}
