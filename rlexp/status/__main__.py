"""How jobs are doing, seen from outside: a line per job, and below why those ended that did not end well.

python -m rlexp.status runs/SWEEP                a sweep, a run, or a folder of runs
python -m rlexp.status runs/SWEEP --watch        drawn again every 2 s, until all jobs have ended
python -m rlexp.status runs/SWEEP --json         the same for scripts

Exit code 0 where nothing failed, 1 where a job has failed or is lost.
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

from rlexp.errors import exit_code
from rlexp.status import draw
from rlexp.status.view import Look, StatusError, View

EVERY = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return exit_code(lambda: status(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlexp.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--watch", action="store_true", help="while jobs go on, with progress bars")
    parser.add_argument("--every", type=float, metavar="SECONDS", help=f"how often; default: {EVERY:g}")
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser.parse_args(argv)


def status(options: argparse.Namespace) -> int:
    every = EVERY if options.every is None else options.every
    if not (every > 0 and math.isfinite(every)):
        raise StatusError(f"--every {every:g}: must be greater than 0.")
    if options.every is not None and not options.watch:
        raise StatusError(f"--every {every:g}: says how often --watch looks. Add --watch, or leave it out.")
    if options.json and options.watch:
        raise StatusError("--json: is one answer, and --watch gives many. Leave one of them out.")
    view = View(Path(options.folder).expanduser())
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


def watch(view: View, every: float) -> Look:
    """In place. What ends this process gives the terminal its cursor back first."""
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


def follow(view: View, every: float) -> Look:
    """Where there is no terminal: a table whenever something has changed."""
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
