"""Compare runs: print a table, and write report.html, curves.png and summary.json.

python -m rlexp.compare runs/SWEEP                     compare the runs of a sweep
python -m rlexp.compare runs/A runs/B                  compare runs, folders of runs, or W&B offline folders
python -m rlexp.compare entity/project                 compare the runs of a W&B project, online
python -m rlexp.compare runs/SWEEP --fail-above 1e-6   exit with code 1 if losses are further apart
python -m rlexp.compare runs/SWEEP --watch             repeat while runs continue
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlexp.base.command import CommandParser, exit_code
from rlexp.base.printable import printable, printable_lines
from rlexp.compare import comparison as reports
from rlexp.compare.comparison import Report
from rlexp.compare.families import sort_out
from rlexp.compare.page import Payload
from rlexp.compare.read_runs import Sources
from rlexp.compare.runs import LIVE, CompareError, Group
from rlexp.compare.table import table
from rlexp.compare.threshold import first_above, remarks
from rlexp.run_files.curve_distance import LOSSES


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    return exit_code(lambda: compare(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("rlexp.compare", __doc__)
    parser.add_argument("sources", nargs="+", metavar="FOLDER",
                        help="a sweep, a run, a folder of runs, or ENTITY/PROJECT")  # fmt: skip
    parser.add_argument("--out", type=Path,
                        help="the report's folder; default: the given folder, or ./comparison for several")  # fmt: skip
    parser.add_argument("--baseline", metavar="RUN", help="compare the others with this run")
    parser.add_argument("--force", action="store_true", help="compare different experiments too; the report says so")
    parser.add_argument("--fail-above", type=float, metavar="X", help="exit with code 1 if two runs are further apart")
    parser.add_argument("--metrics", nargs="+", metavar="NAME",
                        help="metrics for --fail-above, such as 'train/*'; default: the losses")  # fmt: skip
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS",
                        help="repeat every SECONDS (default: 5) while runs continue")  # fmt: skip
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> int:
    if options.fail_above is not None and not options.fail_above >= 0:
        raise CompareError(f"--fail-above {options.fail_above}: must be at least 0.")
    if options.watch is not None and not options.watch > 0:
        raise CompareError(f"--watch {options.watch:g}: must be greater than 0.")
    sources = Sources(options.sources)
    while True:
        group = sources.read()
        watching = options.watch is not None and any(run.status in LIVE for run in group.runs)
        waiting = watching and not any(len(run.steps) for run in group.runs)
        if not waiting:
            report = draw(group, options, options.watch if watching else None)
        if not watching:
            break
        time.sleep(options.watch)
    if options.fail_above is None:
        return 0
    excess = first_above(report.families, group.runs, options.fail_above, options.metrics)
    passed = f"passed: {' and '.join(options.metrics or LOSSES)}: nowhere more than {options.fail_above:g} apart"
    sys.stdout.write(printable_lines(f"FAILED: {excess}\n" if excess else f"{passed}\n"))
    sys.stdout.writelines(f"  {printable(line)}\n" for line in remarks(report.families))
    return 1 if excess else 0


def draw(group: Group, options: argparse.Namespace, watch_seconds: float | None) -> Report:
    report = reports.make(group, sort_out(group, baseline=options.baseline, force=options.force))
    where = options.out or default_place(options.sources)
    payload, paths = reports.write(report, where, watch_seconds=watch_seconds)
    show(payload, paths)
    return report


def show(payload: Payload, paths: Sequence[Path]) -> None:
    names = ", ".join(path.name for path in paths[1:])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write(f"\n{printable_lines(table(payload, width))}\n{paths[0]}  (and {names})\n")
    sys.stdout.flush()


def default_place(sources: Sequence[str]) -> Path:
    """Return the given folder; for several folders, or a W&B project, `comparison`."""
    first = Path(sources[0]).expanduser()
    return first if len(sources) == 1 and first.is_dir() else Path("comparison")


if __name__ == "__main__":
    sys.exit(main())
