"""Why ranks failed, in their own words: which rank failed first, and which failures only followed from it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.base.errors import UserError
from rlexp.base.files import write_text
from rlexp.launch.rank_progress import last_seen
from rlexp.launch.watch import listed

PATIENCE = 10.0  # seconds for the other ranks to report their time-outs too, once one rank has
LINGER = 2.0  # seconds that a rank waits which lost another: the first to end is taken for the cause
FOLDER = "failed"  # of a run: reports of ranks whose launcher is not on their machine

# Errors that a rank reports when another rank went away: a consequence, never the cause.
_COLLATERAL = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket closed|gloo|NCCL|DistBackendError"
    r"|DistNetworkError|DistStoreError|Timed out waiting",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"Timed out waiting|timeout|did not come", re.IGNORECASE)


@dataclass(frozen=True)
class RankReport:
    """Why a rank failed. `at` is a time on a clock that the ranks of a run share."""

    rank: int
    at: float
    text: str
    mistake: UserError | None = None  # the user error, as it was raised
    by_stop: bool = False  # the rank ended because it was asked to, with nothing to save
    log: str | None = None
    killed: bool = False  # from outside, so another start may succeed
    task: int | None = None  # Slurm's number of the task that wrote the log; under torchrun it is not the rank

    @property
    def is_collateral(self) -> bool:
        return self.mistake is None and bool(_COLLATERAL.search(self.last_line))

    @property
    def timed_out(self) -> bool:
        return self.is_collateral and bool(_TIMED_OUT.search(self.last_line))

    @property
    def last_line(self) -> str:
        return self.text.rstrip().rpartition("\n")[2]


def first_of(reports: Sequence[RankReport]) -> RankReport:
    """Return the first cause. Consequences of another rank's end come last."""
    return min(reports, key=lambda report: (report.is_collateral, report.at))


def in_words(report: RankReport, run_dir: Path | None) -> str:
    """Return the report as text for the user."""
    seen = last_seen(run_dir, report.rank) if run_dir is not None else ""
    lines = [f"rank {report.rank} failed: {report.text.rstrip()}"]
    lines += [f"Its log: {report.log}"] if report.log else []
    lines += [f"It was last seen {seen}."] if seen else []
    return "\n".join(lines)


def waited_for(reports: Sequence[RankReport], world_size: int, run_dir: Path | None, log: str = "") -> str | None:
    """If ranks timed out waiting for others, say which ranks were missing and what they were doing; else None. `log` is
    the path of a rank's log, with %t for the rank."""
    if not reports or not (first := first_of(reports)).timed_out:
        return None
    # A missing rank may wake up after the others are gone, and then reports that it lost them.
    ranks = {report.rank for report in reports if report.timed_out or report.at <= first.at + PATIENCE}
    silent = [rank for rank in range(world_size) if rank not in ranks]
    if not silent or run_dir is None:
        return None
    missing = "; ".join(f"rank {rank} was last seen {last_seen(run_dir, rank) or 'nowhere'}" for rank in silent)
    waited = ", ".join(f"rank {rank} {last_seen(run_dir, rank)}" for rank in sorted(ranks) if last_seen(run_dir, rank))
    return (
        f"{listed(silent)} did not come to a collective that the others had begun, within launch.timeout_seconds. "
        f"{missing[0].upper()}{missing[1:]}. Waiting: {waited or listed(sorted(ranks))}.\n"
        f"What rank {first.rank} saw: {first.last_line}"
    ) + (f"\nIts log: {log.replace('%t', str(silent[0]))}" if log else "")


def write(run_dir: Path, start: str, report: RankReport) -> None:
    """Write a rank's report for the process that judges the job. `start` names this start of the job. A full disk is no
    error."""
    _write(run_dir, f"rank{report.rank}", vars(report) | {"start": start, "mistake": report.mistake is not None})


def _write(run_dir: Path, name: str, facts: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        write_text(run_dir / FOLDER / f"{name}.json", json.dumps(facts))


def write_verdict(run_dir: Path, job: str | None, verdict: Mapping[str, Any]) -> None:
    """Write what became of a job, beside run.json, since run.json may belong to another job."""
    _write(run_dir, "verdict", {"job_id": job, **verdict})


def read_verdict(run_dir: Path, job: str | None) -> dict[str, Any]:
    """Return the verdict on this job; empty where the file is another job's."""
    verdict = plain_json.mapping_in(run_dir / FOLDER / "verdict.json") or {}
    return verdict if verdict.get("job_id") == job else {}


def read(run_dir: Path, start: str) -> list[RankReport]:
    """Return the reports of this start's ranks."""
    reports = []
    for place in sorted((run_dir / FOLDER).glob("rank*.json")):
        facts = plain_json.mapping_in(place) or {}
        if facts.pop("start", None) == start:
            mistake = UserError(facts["text"]) if facts.pop("mistake") else None
            reports.append(RankReport(**facts, mistake=mistake))
    return reports
