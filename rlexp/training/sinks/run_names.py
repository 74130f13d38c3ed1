"""The names of a run among many."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from rlexp.config.schema import LoggerConfig

LONGEST = 48  # characters in an id's readable part


def name_of(logger: LoggerConfig, run_dir: Path) -> str:
    """Return the given name, or the folder's. A sweep's job has a number as folder: the sweep's name goes before."""
    numbered = f"{run_dir.parent.name}-{run_dir.name}" if run_dir.name.isdigit() else run_dir.name
    return logger.run_name or numbered


def new_id(logger: LoggerConfig, run_dir: Path) -> str:
    """Return an id that people see in lists and folders: the run's name, and six random digits."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name_of(logger, run_dir)).strip("-")[-LONGEST:].strip("-")
    return f"{readable or 'run'}-{secrets.token_hex(3)}"
