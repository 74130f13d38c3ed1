"""Make a workspace that compares ring sizes in your W&B project.

python -m rlexp.dashboard                            for all runs of the project rlexp
python -m rlexp.dashboard PROJECT --group SWEEP      for the runs of one sweep
python -m rlexp.dashboard --dry-run                  only describe the workspace

Without an account, describe the workspace, and show what to look at on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from shlex import quote

from rlexp.base.command import CommandParser, exit_code
from rlexp.dashboard import workspace
from rlexp.training.sinks.wandb_access import NO_ACCOUNT, has_account


def main() -> int:
    parser = CommandParser("rlexp.dashboard", __doc__)
    parser.add_argument("project", nargs="?", default="rlexp", metavar="PROJECT", help="default: rlexp")
    parser.add_argument("--entity", help="the project's owner; default: the account's own entity")
    parser.add_argument("--group", help="only runs of this group; a sweep's runs form one")
    parser.add_argument("--dry-run", action="store_true", help="describe the workspace, and make nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs on this machine; default: runs")
    options = parser.parse_args()
    return exit_code(lambda: show(options))


def show(options: argparse.Namespace) -> int:
    if options.dry_run:
        say("would make the " + workspace.planned(options.project, options.entity, options.group))
    elif has_account():
        say(f"made: {workspace.send(options.project, options.entity, options.group)}\n")
    else:
        say(NO_ACCOUNT[0].upper() + NO_ACCOUNT[1:] + "\nWith one, this would make the ")
        say(workspace.planned(options.project, options.entity, options.group))
        look_here(options.runs)
    return 0


def look_here(runs: Path) -> None:
    """Show what there is to look at without W&B's server."""
    report = workspace.newest_report(runs)
    if report is None:
        say(f"No report.html in {runs} yet: a sweep writes one, and so does `python -m rlexp.compare`.\n")
    elif has_display() and webbrowser.open(report.resolve().as_uri()):
        say(f"Opened {report}\n")
    else:
        say(f"The newest report: {report}\n")
    together = workspace.gather(runs)
    if together is not None:
        folder = quote(str(together))
        say(f"W&B's own view of the runs here, in the terminal: wandb leet {folder}\n")
        say(f"To send them once there is an account: ls -d {folder}/offline-run-* | xargs -n 1 wandb sync\n")


def has_display() -> bool:
    """Whether there is a display. Without one, a text browser would take over the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def say(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
