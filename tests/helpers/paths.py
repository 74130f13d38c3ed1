"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "files"
