"""Group runs into families: runs whose curves depend on the same settings. Each family has one baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.compare.runs import CompareError, Group, LoggedRun
from rlexp.config.identity import changes, of_length


@dataclass
class Family:
    """Runs that should have one curve."""

    baseline: LoggedRun
    runs: list[LoggedRun]  # including the baseline

    def others(self) -> list[LoggedRun]:
        return [run for run in self.runs if run is not self.baseline]


@dataclass
class Families:
    families: list[Family]
    forced: list[str]  # settings that differ although the runs are compared
    notes: list[str]


def sort_out(group: Group, *, baseline: str | None, force: bool) -> Families:
    """Group the runs into families.

    Runs that differ in a setting which their curves depend on are refused, unless `force` is given. If their sweep
    varies just that setting on purpose, each of its values gets a family of its own.
    """
    drawn = [run for run in group.runs if len(run.steps)]
    if not drawn:
        reasons = "; ".join(f"{run.label} is {run.status}: {run.reason}" for run in group.runs if run.reason)
        raise CompareError(f"{group.title}: no run has a step yet{f' ({reasons})' if reasons else ''}.")
    chosen = _named(drawn, group.runs, baseline) if baseline else None
    first = chosen or next((run for run in drawn if run.identity), drawn[0])
    forced: list[str] = []
    apart = [run for run in drawn if different(first, run)]
    unexplained = [run for run in apart if not on_purpose(first, run, group.axes)]
    if not unexplained:
        families = [drawn]
        if apart:
            by_experiment: dict[str, list[LoggedRun]] = {}
            for run in drawn:  # files are compared by their contents, not by their paths
                known = {key: value["contents"] if isinstance(value, dict) and "contents" in value else value
                         for key, value in depends(run).items()}  # fmt: skip
                by_experiment.setdefault(json.dumps(known, sort_keys=True), []).append(run)
            families = list(by_experiment.values())
    elif force:
        families = [drawn]
        forced = [f"{run.label}: {line}" for run in apart for line in different(first, run)]
    else:
        run = unexplained[0]
        raise CompareError(
            f"{run.name}: is not the same experiment as {first.name}: {different(first, run)[0]}. Their curves need "
            f"not agree. Compare runs of one experiment, or add --force."
        )
    notes: list[str] = []
    return Families([_family(family, group.runs, chosen, notes) for family in families], forced, notes)


def different(one: LoggedRun, other: LoggedRun) -> list[str]:
    """List the settings that differ and that curves depend on."""
    if not one.identity or not other.identity:
        return []
    return [f"{key} is {new} here and {old} there" for key, old, new in changes(depends(one), depends(other))]


def depends(run: LoggedRun) -> dict[str, Any]:
    """Return what a run's curve depends on: its identity, and what of its length its learning rate depends on."""
    return run.identity | of_length(run.identity, run.total_steps, run.warmup_steps)


def on_purpose(one: LoggedRun, other: LoggedRun, axes: Sequence[str]) -> bool:
    """Whether a sweep made two runs differ: it gives them different baselines, or it varies just what differs."""
    if one.baseline is not None and other.baseline is not None:
        return one.baseline != other.baseline
    keys = [key for key, _, _ in changes(depends(one), depends(other))]
    return all(any(key == axis or key.startswith(f"{axis}.") for axis in axes) for key in keys)


def _named(drawn: Sequence[LoggedRun], runs: Sequence[LoggedRun], baseline: str) -> LoggedRun:
    matches = [run for run in runs if baseline in (run.name, run.label, run.name.rpartition("/")[2])]
    if len(matches) == 1 and len(matches[0].steps):
        return matches[0]
    names = ", ".join(f"{run.name} ({run.label})" for run in drawn)
    what = "has no step yet" if len(matches) == 1 else ("names several runs" if matches else "names no run")
    raise CompareError(f"--baseline {baseline}: {what}. The runs are {names}.")


def _family(
    runs: list[LoggedRun], everything: Sequence[LoggedRun], chosen: LoggedRun | None, notes: list[str]
) -> Family:
    """Choose the baseline: the run named by the user, or the sweep's baseline, or the first run with a curve."""
    if chosen in runs:
        return Family(chosen, runs)
    meant = next((run.baseline for run in runs if run.baseline), None)
    baseline = next((run for run in runs if run.path == meant), None)
    if baseline is None and meant is not None:
        absent = next((run for run in everything if run.path == meant), None)
        why = f" ({absent.status}: {absent.reason})" if absent is not None and absent.reason else ""
        notes.append(
            f"the baseline {absent.label if absent else meant} has no curve{why}; "
            f"{runs[0].label} is the baseline instead"
        )
    return Family(baseline or runs[0], runs)
