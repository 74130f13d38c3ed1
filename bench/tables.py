"""Tables that a program writes into a page of docs/, between two markers."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench import kept_rows, where


def put(page: Path, text: str, name: str = "table") -> None:
    """Replace the table of this name. A page may have several. What another page keeps of them is copied there."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise SystemExit(f"{page}: has no {begin} … {end} to write between. Add both lines to it.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    for problem in kept_rows.refresh(page):
        print(f"{problem}. Keep another row.", file=sys.stderr)
    if page.parent.name == kept_rows.MEASURED:
        where.refresh(page.parent.parent / where.PAGE)


def signature(module: str) -> str:
    """When, at which commit and by which command a table was measured."""
    from rlexp.launch.run_folder import (
        git_commit,  # not at the top: bench.gpu_attention runs where only torch is installed
    )

    commit = (git_commit() or "unknown")[:12]
    return f"Measured {time.strftime('%Y-%m-%d')} at commit {commit}, CPU, by `python -m {module}`."


def commit(given: str | None = None) -> str:
    """Name the commit of the code, as in "commit 0123456789ab, with changes that are not committed"."""
    from rlexp.launch.run_folder import git_commit

    full = given or git_commit("rlexp", "conf", "bench") or "unknown"
    return f"commit {full[:12]}" + (", with changes that are not committed" if full.endswith("+dirty") else "")
