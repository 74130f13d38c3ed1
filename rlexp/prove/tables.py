"""Tables that a program writes into a page of docs/, between two markers."""

from __future__ import annotations

import time
from pathlib import Path

from rlexp.launch.folder import git_commit


def put(page: Path, text: str, name: str = "table") -> None:
    """A page may have several tables, each with a name of its own."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise ValueError(f"{page}: has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def signature(module: str) -> str:
    """When, on what and by which command a table was measured."""
    commit = (git_commit() or "unknown")[:12]
    return f"Measured {time.strftime('%Y-%m-%d')} at commit {commit}, CPU, by `python -m {module}`."
