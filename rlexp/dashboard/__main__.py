"""Make a workspace that compares ring sizes in your W&B project.

python -m rlexp.dashboard                            for all runs of the project rlexp
python -m rlexp.dashboard PROJECT --group SWEEP      for the runs of one sweep
python -m rlexp.dashboard --dry-run                  only describe the workspace

Without an account, describe the workspace, and show what to look at on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from rlexp.base.command import CommandParser, exit_code
from rlexp.base.errors import SinkError
from rlexp.run_files.curve_distance import SAMPLED, SCORE
from rlexp.training.sinks.baseline import PARITY
from rlexp.training.sinks.wandb_access import NO_ACCOUNT, STEP, fragments_beneath, has_account, refusals

PHASES = ("collect", "data", "reference", "forward", "backward", "optimizer")
BY_RING = "ring_size"  # a flat key in every run's configuration: W&B can group by flat keys only
NEWEST = 50  # the most runs drawn
TOGETHER = "wandb"  # a folder in the runs' folder, with links to what W&B wrote for each run


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    by_ring: Literal["mean", "max"] | None = "mean"  # how the runs of one ring size become a line; None: a line per run
    log_y: bool = False
    bars: bool = False  # bars of the summary's values, not a line over the steps


SAMPLES = "Samples"  # a section only for runs that draw their own samples
SECTIONS = {
    "Loss": (
        Panel("Loss by ring size", "train/loss"),
        Panel("Held-out loss by ring size", "eval/loss"),
        Panel("Loss of each run", "train/loss", by_ring=None),
        Panel("Reward margin by ring size", "train/rewards/margins"),
    ),
    SAMPLES: (
        Panel("Score by ring size", SCORE),
        Panel("Score of each run", SCORE, by_ring=None),
        Panel("Divergence from the reference", "train/objective/kl"),
        Panel("Entropy of the policy", "train/policy/entropy_avg"),
        Panel("Ratio to the policy that drew them", "train/val/ratio"),
        Panel("Gap to the model that drew them", "train/sampling/sampling_logp_difference/mean"),
        Panel("Tokens of an answer", "train/response/length"),
        Panel("Answers that came to an end", "train/response/stopped"),
    ),
    "Difference to the baseline": (Panel("|loss − baseline's|", PARITY, by_ring=None, log_y=True),),
    "Memory": (
        Panel("Highest peak by ring size", "max/memory/peak_bytes", by_ring="max", bars=True),
        Panel("Highest peak of tensors by ring size", "max/memory/tensors_peak_bytes", by_ring="max", bars=True),
        *(Panel(f"Peak: {phase}", f"memory/{phase}_peak_bytes", by_ring="max") for phase in PHASES),
    ),
    "Throughput": (
        Panel("Tokens per second", "train/tokens_per_second"),
        Panel("Seconds per step", "train/step_seconds"),
        Panel("TFLOP/s per GPU", "train/tflops"),
    ),
}


def title_of(group: str | None) -> str:
    return f"rlexp ring sizes, {group}" if group else "rlexp ring sizes"


def planned(project: str, entity: str | None, group: str | None) -> str:
    """Describe the workspace in words."""
    where = f"{entity}/{project}" if entity else project
    whose = f"the runs of group {group}" if group else "all runs"
    lines = [f"workspace “{title_of(group)}” in the W&B project {where}, for {whose}:"]
    for name, panels in SECTIONS.items():
        lines.append(f"  {name}{' (for runs that generate their own samples)' * (name == SAMPLES)}")
        for panel in panels:
            how = f"{panel.by_ring} by {BY_RING}" if panel.by_ring else "each run"
            over = "summary, bars" if panel.bars else f"over {STEP}"
            lines.append(f"    {panel.title}: {panel.metric} ({how}, {over}{', logarithmic' * panel.log_y})")
    return "\n".join(lines) + "\n"


def workspace(project: str, entity: str, group: str | None, *, sampled: bool) -> Any:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def drawn(panel: Panel) -> Any:
        groupby = reports.Config(BY_RING) if panel.by_ring else None
        alike: dict[str, Any] = {"title": panel.title, "groupby": groupby, "groupby_aggfunc": panel.by_ring}
        if panel.bars:
            return reports.BarPlot(**alike, metrics=[panel.metric], orientation="v")
        alike["groupby_rangefunc"] = "minmax" if panel.by_ring else None
        return reports.LinePlot(**alike, x=STEP, y=[panel.metric], log_y=panel.log_y or None)

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=title_of(group),
        sections=[
            workspaces.Section(name=name, panels=[drawn(panel) for panel in panels], is_open=True)
            for name, panels in SECTIONS.items()
            if sampled or name != SAMPLES
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP, max_runs=NEWEST),
        runset_settings=workspaces.RunsetSettings(
            filters=[workspaces.Metric("Group") == group] if group else "",
            pinned_columns=[f"config:{BY_RING}.value", "summary:best/train/loss", "summary:max/memory/peak_bytes"],
        ),
    )


def send(project: str, entity: str | None, group: str | None) -> str:
    """Save the workspace in the user's project, and return its address."""
    if not has_account():
        raise SinkError(f"{project}: {NO_ACCOUNT}")
    import wandb

    with refusals(project):
        api = wandb.Api()
        entity = entity or api.default_entity
    if not entity:
        raise SinkError(f"{project}: this account has no default entity. Give --entity ENTITY.")
    try:
        with refusals(f"{entity}/{project}"):
            _ = api.project(project, entity).id
    except SinkError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        raise SinkError(
            f"{entity}/{project}: no such project, or this account may not see it. An online run creates it, and so "
            f"does `wandb sync` of an offline run. --entity names its owner."
        ) from None
    with refusals(f"{entity}/{project}"):
        runs = api.runs(f"{entity}/{project}", {"group": group} if group else {}, order="-created_at", lazy=False)
        names = [name for run in itertools.islice(runs, NEWEST) for name in run.summary_metrics]
        sampled = any(name.startswith(SAMPLED) for name in names)
        return str(workspace(project, entity, group, sampled=sampled).save().url)


def gather(runs: Path) -> Path | None:
    """Link all that W&B wrote offline beneath a folder into one folder, since W&B's terminal view shows one folder."""
    fragments = list(fragments_beneath(runs))
    if not fragments:
        return None
    together = runs / TOGETHER
    together.mkdir(exist_ok=True)
    for link in together.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
    for path in fragments:
        with contextlib.suppress(FileExistsError):
            (together / path.name).symlink_to(os.path.relpath(path, together))
    return together


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
        say("would make the " + planned(options.project, options.entity, options.group))
    elif has_account():
        say(f"made: {send(options.project, options.entity, options.group)}\n")
    else:
        say(NO_ACCOUNT[0].upper() + NO_ACCOUNT[1:] + "\nWith one, this would make the ")
        say(planned(options.project, options.entity, options.group))
        look_here(options.runs)
    return 0


def look_here(runs: Path) -> None:
    """Show what there is to look at without W&B's server."""
    reports = [*runs.glob("report.html"), *runs.glob("*/report.html"), *runs.glob("*/*/report.html")]
    report = max(reports, key=lambda path: path.stat().st_mtime, default=None)  # of a sweep or a comparison
    # Without a display, a text browser would take over the terminal.
    graphical = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if report is None:
        say(f"No report.html in {runs} yet: a sweep writes one, and so does `python -m rlexp.compare`.\n")
    elif graphical and webbrowser.open(report.resolve().as_uri()):
        say(f"Opened {report}\n")
    else:
        say(f"The newest report: {report}\n")
    together = gather(runs)
    if together is not None:
        folder = quote(str(together))
        say(f"W&B's own view of the runs here, in the terminal: wandb leet {folder}\n")
        say(f"To send them once there is an account: ls -d {folder}/offline-run-* | xargs -n 1 wandb sync\n")


def say(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
