"""Show the state of jobs: one line per job, and below it why a job failed, stopped or is lost.

python -m rlexp.status runs/SWEEP                show a sweep, a run, or a folder of runs
python -m rlexp.status runs/SWEEP --watch        repeat every 2 s, until all jobs have ended
python -m rlexp.status runs/SWEEP --json         print the same for scripts

The exit code is 1 if a job has failed or is lost, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from rlexp.base.command import CommandParser, exit_code
from rlexp.status import draw
from rlexp.status.view import Look, StatusError, StatusView

EVERY = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser("rlexp.status", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a sweep, a run, or a folder of runs")
    parser.add_argument("--watch", action="store_true", help="repeat until all jobs have ended, with progress bars")
    parser.add_argument("--every", type=float, metavar="SECONDS", help=f"how often --watch looks; default: {EVERY:g}")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    options = parser.parse_args(argv)
    return exit_code(lambda: status(options))


def status(options: argparse.Namespace) -> int:
    every = EVERY if options.every is None else options.every
    if not (every > 0 and math.isfinite(every)):
        raise StatusError(f"--every {every:g}: must be greater than 0.")
    if options.every is not None and not options.watch:
        raise StatusError(f"--every {every:g}: sets how often --watch looks. Add --watch, or leave --every out.")
    if options.json and options.watch:
        raise StatusError("--json: prints one answer, and --watch many. Leave one of them out.")
    view = StatusView(Path(options.folder).expanduser())
    terminal = sys.stdout.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")
    if options.watch:
        look = (watch if terminal else follow)(view, every)
    else:
        look = view.look()
        if options.json:
            sys.stdout.write(json.dumps(draw.plain(look), indent=2) + "\n")
        elif terminal:
            console = Console(highlight=False)
            console.print(draw.page(look, console.width))
        else:
            sys.stdout.write(draw.text(look))
    sys.stdout.flush()
    return 1 if look.ill else 0


def watch(view: StatusView, every: float) -> Look:
    """Draw in place. A signal that ends this process first gives the terminal its cursor back."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False)
    look = view.look()
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while look.live:
            live.update(draw.page(look, console.width, lines=console.height, bars=True), refresh=True)
            time.sleep(every)
            look = view.look()
        live.update(draw.page(look, console.width), refresh=True)
    return look


def follow(view: StatusView, every: float) -> Look:
    """Print a table whenever something has changed, for output that is not a terminal."""
    before = ""
    while True:
        look = view.look()
        now = draw.text(look)
        if now != before:
            sys.stdout.write(now if not before else f"\n{now}")
            sys.stdout.flush()
        before = now
        if not look.live:
            return look
        time.sleep(every)


if __name__ == "__main__":
    sys.exit(main())
