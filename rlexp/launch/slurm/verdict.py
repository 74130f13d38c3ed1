"""Judge a job whose ranks are gone: did it fail, and does Slurm start it again? A pure function of `Facts`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.launch import rank_reports
from rlexp.launch.rank_reports import RankReport
from rlexp.launch.slurm.traces import EXITED_1, GOES_ON, Gone, last_error
from rlexp.launch.stops import name_of, stopped_by

AGAIN = "; Slurm starts it again"
# Starts in a row that may save no further step. On a slow node, Slurm's order to end one start may hit the next.
IN_VAIN = 10


@dataclass(frozen=True)
class Facts:
    """Everything that the verdict depends on."""

    code: int  # srun's exit code
    status: str | None  # from run.json, as is the reason
    reason: str | None
    reports: Sequence[RankReport] = ()
    gone: Sequence[Gone] = ()  # in the order in which they ended
    out_of_memory: bool = False
    world_size: int = 1
    step: int = 0  # the newest checkpoint's
    requeues: Sequence[dict[str, Any]] = ()
    retries: int = 0
    run_dir: Path | None = None
    log: str = ""  # path of a rank's log, with %t for the rank
    nodes_answer: bool | None = None  # whether all nodes answer and none restarted; None if not asked
    node_failed: bool = False  # srun reported it
    node_silent: bool = False  # srun lost the daemon that started the ranks on a node
    over_limit: Sequence[int] = ()  # ranks that Slurm killed because the job used too much memory


@dataclass(frozen=True)
class Verdict:
    status: str
    reason: str
    code: int
    requeue: str = ""  # why Slurm starts the job again; empty if it does not


def judge(facts: Facts) -> Verdict:
    """Apply the rules in order; the first that fits decides."""
    causes = [report for report in facts.reports if not report.is_collateral and not report.killed]
    lost = [task for task in facts.gone if not task.by_stop and not _followed(facts, task)]
    killed = next((task for task in lost if task.rank in facts.over_limit), next(iter(lost), None))
    if causes:
        return _failed(facts, _told(facts, rank_reports.first_of(causes)))
    if facts.status == "failed":
        return _failed(facts, facts.reason or "")
    if facts.code == 0 and facts.status in ("finished", "stopped"):
        return Verdict(facts.status, facts.reason or "", 0)
    if facts.status == "finished" and all(task.early or task.by_stop for task in facts.gone) and not facts.reports:
        return Verdict("finished", facts.reason or "", 0)  # ranks that were slow to exit were killed
    if killed_here := [report for report in facts.reports if report.killed]:
        return _again(facts, "retry", _told(facts, killed_here[0]))
    if facts.node_failed or facts.nodes_answer is False:
        first = rank_reports.first_of(facts.reports) if facts.reports else None
        detail = f". See {_log(facts, 0)}" if first is None else f": {_told(facts, first)}"
        return _again(facts, "lost", f"a node or its network was lost{detail}")
    if hung := rank_reports.waited_for(facts.reports, facts.world_size, facts.run_dir, facts.log):
        return _again(facts, "retry", hung)
    if killed is not None:
        return _again(facts, "retry", _how_killed(facts, killed))
    if (stop := _stop(facts)) is not None:
        if stop not in GOES_ON:
            return Verdict("stopped", stopped_by(stop), 128 + stop)
        return _again(facts, "stop", stopped_by(stop))
    if facts.reports and (silent := silent_ranks(facts)):
        return _again(facts, "retry", _how_killed(facts, Gone(silent[0], "", "exited", early=True)))
    if facts.reports:  # every rank lost the others and could report it
        return _again(facts, "retry", _told(facts, rank_reports.first_of(facts.reports)))
    return _again(facts, "retry", f"srun ended with code {facts.code}, and no rank said why. See {_log(facts, 0)}")


def _failed(facts: Facts, reason: str) -> Verdict:
    return Verdict("failed", reason, facts.code or 1)


def _again(facts: Facts, why: str, reason: str) -> Verdict:
    """Requeue the job, unless its retries are used up or its restarts make no progress."""
    retried = sum(each["why"] == "retry" for each in facts.requeues)
    if why == "retry" and retried >= facts.retries:
        spent = f" ({retried} retries are used up)" if retried else ""
        return _failed(facts, reason + spent)
    last = list(facts.requeues)[-IN_VAIN:]
    if why != "retry" and len(last) == IN_VAIN and all(each["step"] == facts.step for each in last):
        return _failed(
            facts,
            f"{reason}\nIt was started {IN_VAIN} times since step {facts.step} was saved, and saved no later step. "
            f"Raise launch.time_limit, or save more often: checkpoint.save_every=5m.",
        )
    return Verdict("stopped", reason + AGAIN, facts.code or 1, requeue=why)


def silent_ranks(facts: Facts) -> list[int]:
    """Return the ranks that neither reported nor were seen to end. srun does not mention a rank that exits with 0 when
    the others end soon after."""
    known = {report.rank for report in facts.reports} | {task.rank for task in facts.gone}
    return [rank for rank in range(facts.world_size) if rank not in known]


def ambiguous(facts: Facts) -> bool:
    """Whether a rank was lost and only its node can tell why. NCCL's watchdog aborts the ranks that wait for it."""
    aborted = [task for task in facts.gone if task.how.startswith("Aborted")]
    others = any(not task.by_stop and task not in aborted and not _followed(facts, task) for task in facts.gone)
    left = (facts.reports or aborted) and not others
    return bool(silent_ranks(facts)) and bool(left or facts.node_silent) and facts.status != "finished"


def _followed(facts: Facts, task: Gone) -> bool:
    """Whether a rank reported a consequence and exited with 1, so that it is not the cause."""
    return task.how == EXITED_1 and any(report.rank == task.rank for report in facts.reports)


def _stop(facts: Facts) -> signal.Signals | None:
    """Return the signal by which all ranks stopped, in good order or before they had begun; else None."""
    codes = {128 + signum: signum for signum in (*GOES_ON, signal.SIGINT)}
    if facts.status == "stopped":
        signums = [signum for signum in codes.values() if facts.reason == stopped_by(signum)]
        return signal.Signals(signums[0]) if signums else None
    if facts.gone and all(task.by_stop for task in facts.gone):
        return signal.Signals(codes.get(facts.code, signal.SIGTERM))
    return None


def _told(facts: Facts, report: RankReport) -> str:
    log = _log(facts, report.rank if report.task is None else report.task)
    if report.mistake is not None:
        return f"{report.text}\nIts log: {log}"
    return rank_reports.in_words(RankReport(report.rank, report.at, report.text, log=log), facts.run_dir)


def _log(facts: Facts, task: int) -> str:
    return facts.log.replace("%t", str(task))


def _how_killed(facts: Facts, task: Gone) -> str:
    words = {"Killed": f"was killed by {name_of(signal.SIGKILL)}", "Out Of Memory": "was killed for its memory"}
    how = words.get(task.how, task.how[0].lower() + task.how[1:])
    if task.early:
        how = "exited with code 0 before the others had ended"
    memory = ", since its node had no memory left for it" if facts.out_of_memory else ""
    if task.rank in facts.over_limit:
        memory = ", since the job took more memory there than it had asked for: raise launch.rank_memory_gb"
    on = f" on node {task.node}" if task.node else ""
    if task.rank is None:
        return f"torchrun {how}{on}{memory}\nIts log: {_log(facts, task.task or 0)}"
    error = f": {last_error(_log(facts, task.rank))}" if task.how.startswith("Exited") and task.task is None else ""
    text = f"the process {how}{on}{memory}{error}".removesuffix(": ")
    return _told(facts, RankReport(task.rank, 0.0, text, task=task.task))
