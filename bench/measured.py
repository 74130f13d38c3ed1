"""The common part of the benchmarks: their command line, and the machine and load they were measured with."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.tables import put
from rlexp.config.hardware import visible_gpus
from rlexp.launch.run_folder import git_commit


def print_tables(
    module: str,
    doc: str | None,
    tables: Mapping[str, Callable[[], str]],
    marker: str = "table",
    *,
    precision: str = "float32",
) -> None:
    """Measure all tables, or the one that is asked for; print them, and write them into a page on request."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="put the tables into this page, between its markers")
    parser.add_argument("--only", choices=tables, help="only this table")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [options.only] if options.only else list(tables)
    text = "\n\n".join([about(module, precision), *(with_load(tables[name]) for name in chosen)])
    print(text)
    if options.write:
        put(options.write, text, marker)


def about(module: str, precision: str = "float32") -> str:
    commit = git_commit() or "unknown"
    changed = ", with changes that are not committed," if commit.endswith("+dirty") else ""
    return (
        f"Measured {time.strftime('%Y-%m-%d')} at commit {commit[:12]}{changed} by `python -m {module}`\n"
        f"on {processor()}, {os.cpu_count()} cores, {visible_gpus()} GPUs; torch {torch.__version__}, "
        f"one thread per rank, {precision}."
    )


def with_load(table: Callable[[], str]) -> str:
    """Add the load average. Only the value before shows other work; afterwards it is mostly the benchmark itself."""
    before, began = os.getloadavg()[0], time.monotonic()
    text, after = table(), os.getloadavg()[0]
    return f"{text}\n\nLoad average {before:.1f} before and {after:.1f} after {time.monotonic() - began:.0f} seconds."


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
