"""What a run is called where it is one of many."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from rlexp.config.schema import LoggerConfig

LONGEST = 48  # of an id's readable part


def name_of(logger: LoggerConfig, run_dir: Path) -> str:
    """What was given, or the folder's; that of a sweep's job, which is but a number, with the sweep's before it."""
    numbered = f"{run_dir.parent.name}-{run_dir.name}" if run_dir.name.isdigit() else run_dir.name
    return logger.run_name or numbered


def new_id(logger: LoggerConfig, run_dir: Path) -> str:
    """What people see in lists and folders: the run's name, and six digits so that there is no other."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name_of(logger, run_dir)).strip("-")[-LONGEST:].strip("-")
    return f"{readable or 'run'}-{secrets.token_hex(3)}"
