"""Compare runs: print a table, and write report.html, curves.png and summary.json.

python -m rlexp.compare runs/SWEEP                     compare the runs of a sweep
python -m rlexp.compare runs/A runs/B                  compare runs, folders of runs, or W&B offline folders
python -m rlexp.compare entity/project                 compare the runs of a W&B project, online
python -m rlexp.compare runs/SWEEP --fail-above 1e-6   exit with code 1 if losses are further apart
python -m rlexp.compare runs/SWEEP --watch             repeat while runs continue
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlexp.base.command import CommandParser, exit_code
from rlexp.base.errors import SinkError
from rlexp.base.printable import printable, printable_lines
from rlexp.compare import comparison as reports
from rlexp.compare.comparison import Report
from rlexp.compare.families import sort_out
from rlexp.compare.runs import LIVE, SIZES, CompareError, Group, LoggedRun, RunReader, merge
from rlexp.compare.table import table
from rlexp.compare.threshold import first_above, remarks
from rlexp.run_files.curve_distance import LOSSES
from rlexp.run_files.metrics_jsonl import columns_of
from rlexp.training.sinks.wandb_access import WandbRun, read_offline, read_project

OF_WANDB = ("*.wandb", "offline-run-*", "run-*", "wandb/offline-run-*", "wandb/run-*")


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
    reader = RunReader()
    while True:
        group = merge([read(name, reader) for name in dict.fromkeys(options.sources)])
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


def read(name: str, reader: RunReader) -> Group:
    """Read the runs of one source: rlexp's folder, a folder of W&B's offline runs, or a W&B project."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (group := reader.group(path)) is not None:
            return group
        if any(True for each in OF_WANDB for _ in path.glob(each)):
            return from_wandb(path.resolve().name, read_offline(path))
        raise CompareError(
            f"{name}: holds no run: no metrics.jsonl, no run.json, no folder with one of them, and no offline W&B "
            f"run. Give a sweep's folder, or runs' folders."
        )
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        try:
            return from_wandb(name, read_project(name))
        except SinkError as error:
            raise CompareError(f"{name}: no such folder in {Path.cwd()}. As a W&B project: {error}") from error
    raise CompareError(f"{name}: no such folder. Relative paths start at {Path.cwd()}.")


def from_wandb(title: str, wandb_runs: Sequence[WandbRun]) -> Group:
    runs, axes = [], []
    for each in wandb_runs:
        config: dict[str, Any] = {key: value for key, value in each.config.items() if isinstance(value, dict)}
        config["seed"] = each.config.get("seed")
        identity = config.pop("identity", {})
        steps, columns = columns_of(each.rows)
        own = config.get("logger", {}).get("axes")
        own = own if isinstance(own, dict) else {}
        axes += list(own)
        sizes = {key: each.config[key] for key in SIZES if key in each.config}
        label = ", ".join(str(value) for value in own.values()) or each.name
        run = LoggedRun(each.id, label, None, each.state, None, steps, columns, config, identity, sizes)
        runs.append(run)
    return Group(title, runs, list(dict.fromkeys(axes)))


def draw(group: Group, options: argparse.Namespace, watch_seconds: float | None) -> Report:
    report = reports.make(group, sort_out(group, baseline=options.baseline, force=options.force))
    first = Path(options.sources[0]).expanduser()
    one_folder = len(options.sources) == 1 and first.is_dir()
    where = options.out or (first if one_folder else Path("comparison"))
    payload, paths = reports.write(report, where, watch_seconds=watch_seconds)
    names = ", ".join(path.name for path in paths[1:])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write(f"\n{printable_lines(table(payload, width))}\n{paths[0]}  (and {names})\n")
    sys.stdout.flush()
    return report


if __name__ == "__main__":
    sys.exit(main())
